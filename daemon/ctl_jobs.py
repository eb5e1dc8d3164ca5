"""From what a person types to a job's description: files, options, relative paths."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Raw = dict[str, Any]


class BadJob(Exception):
    """What was typed makes no job; the message says what to change."""


def from_file(path: Path) -> Raw:
    """Read job.toml. Without a `name`, the file's own is taken."""
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadJob(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadJob(f"{path}: is not TOML: {error}") from None
    raw.setdefault("name", _name(path.stem))
    return raw


def from_command(command: Sequence[str], module: bool) -> Raw:
    """['train.py', '--lr', '1'] -> the job's first fields."""
    what, *args = command
    key = "module" if module else "script"
    return {key: what, "args": args, "name": _name(Path(what).stem if not module else what)}


def override(raw: Raw, settings: Iterable[str]) -> None:
    """Apply 'checkpoint.keep=5' and the like. A value is read as TOML, else as text."""
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadJob(f"--set {text}: write FIELD=VALUE, as in checkpoint.keep=5")
        put(raw, name.strip(), _value(value))


def put(raw: Raw, name: str, value: Any) -> None:
    *tables, last = name.split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise BadJob(f"{name}: {table!r} is not a table")
    raw[last] = value


def resolve(raw: Raw, here: Path) -> None:
    """Make paths absolute, from `here`: the daemon runs elsewhere. The script must be there."""
    workdir = raw["workdir"] = str(_absolute(raw.get("workdir") or ".", here))
    if isinstance(script := raw.get("script"), str) and script:
        found = next((p for p in (_absolute(script, here), Path(workdir, script)) if p.is_file()), None)
        if found is None:
            raise BadJob(f"script = {script!r}: there is no such file in {here}")
        raw["script"] = str(found)
    if "/" in (python := raw.get("python") or ""):
        raw["python"] = str(_absolute(python, here, follow=False))
    checkpoint = raw.get("checkpoint")
    if isinstance(checkpoint, dict) and isinstance(folder := checkpoint.get("dir"), str) and folder:
        checkpoint["dir"] = str(_absolute(folder, here))


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, or with the first number that nobody has."""
    known = set(taken)
    if wanted not in known:
        return wanted
    return next(name for n in range(2, len(known) + 3) if (name := f"{wanted}-{n}") not in known)


def _absolute(text: str, here: Path, follow: bool = True) -> Path:
    path = here / Path(text).expanduser()
    return path.resolve() if follow else Path(os.path.abspath(path))


def _name(text: str) -> str:
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text.lower())
    return cleaned.strip("._-")[:60] or "job"


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
