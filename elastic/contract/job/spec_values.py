"""Limits of a job's strings and numbers, whatever the field. A value that no process, path, timer or record can hold is
rejected when the job is submitted, instead of failing minutes later in an agent. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MAX_NUMBER = 10**9
"""Of any count or duration (some 30 years): timers and record fields are bounded."""
MAX_TEXT_CHARS = 100_000
"""Linux accepts 128 KiB for one argument or environment variable."""
MAX_ITEMS = 10_000
"""Arguments, variables, modules to preload."""
MAX_PATH_BYTES, MAX_PART_BYTES = 4095, 255
"""Of a path, and of one name in it, on Linux."""
MAX_SPEC_BYTES = 512 * 1024
"""Of a job's record in etcd, whose requests may have 1.5 MiB."""
MAX_WORKERS_PER_NODE = 1024
MAX_NODES = 65_536
PATHS = frozenset({"script", "program", "workdir", "python", "env_file", "checkpoint.dir", "tensorboard"})
NODES = re.compile(r"[0-9]{1,9}(:[0-9]{1,9})?")


def complaint(spec: msgspec.Struct) -> str:
    """The problem of the first invalid field, as "env.LR = 0.1: …"; '' if all are valid."""
    if found := next(_complaints(spec), ""):
        return found
    size = len(msgspec.json.encode(spec))
    return f"the job takes {size} bytes as a record: at most {MAX_SPEC_BYTES}" if size > MAX_SPEC_BYTES else ""


def environment_complaint(env: Mapping[Any, Any]) -> str:
    """The problem of the first invalid variable; '' if all are valid."""
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            return f"env: {name!r} is no name of a variable: it needs a character, and may have neither '=' nor NUL"
        if len(name) > MAX_PART_BYTES:
            return f"env: a variable's name has {len(name)} characters: at most {MAX_PART_BYTES}"
        if not isinstance(value, str):
            return f"env.{name} = {value!r}: a text is needed: write it in quotes"
        if wrong := _text(value):
            return f"env.{name} = {_shown(value)}: {wrong}"
    return f"env has {len(env)} variables: at most {MAX_ITEMS}" if len(env) > MAX_ITEMS else ""


def parse_env_file(text: str) -> dict[str, str]:
    """A file of environment variables: NAME=VALUE lines, as `docker run --env-file` and systemd's EnvironmentFile take
    them. Blank lines and lines that begin with '#' are skipped, an `export ` before a name is dropped, and one pair of
    quotes around a whole value. Nothing is expanded. Raises ValueError, which names the line and never its value: it
    may be a secret."""
    variables: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not name.isidentifier():
            raise ValueError(f"line {number}: write NAME=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if environment_complaint({name: value}):
            raise ValueError(f"line {number}: the value of {name} holds a NUL, or is too long")
        variables[name] = value
    return variables


def _complaints(table: msgspec.Struct, path: str = "") -> Iterator[str]:
    for name in table.__struct_fields__:
        value, field = getattr(table, name), f"{path}{name}"
        if isinstance(value, msgspec.Struct):
            yield from _complaints(value, f"{field}.")
        elif isinstance(value, str):
            wrong = _text(value) or (_path(value) if field in PATHS else "")
            yield from [f"{field} = {_shown(value)}: {wrong}"] if wrong else []
        elif isinstance(value, tuple):
            yield from (f"{field}[{i}] = {_shown(v)}: {wrong}" for i, v in enumerate(value) if (wrong := _text(v)))
            if len(value) > MAX_ITEMS:
                yield f"{field} has {len(value)} items: at most {MAX_ITEMS}"
        elif isinstance(value, dict):
            yield from [wrong] if (wrong := environment_complaint(value)) else []
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{field} = {value}: a finite number is needed; a very large one does the same: {MAX_NUMBER}"
        elif isinstance(value, int | float) and value > MAX_NUMBER:
            yield f"{field} = {value:g}: at most {MAX_NUMBER}"


def _text(value: str) -> str:
    if "\0" in value:
        return "holds a NUL, which no path, argument or variable can"
    return f"has {len(value)} characters: at most {MAX_TEXT_CHARS}" if len(value) > MAX_TEXT_CHARS else ""


def _path(value: str) -> str:
    if len(value.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
        return f"is longer than the {MAX_PATH_BYTES} bytes of a path"
    if any(len(part.encode(errors="surrogatepass")) > MAX_PART_BYTES for part in value.split("/")):
        return f"a name in it is longer than {MAX_PART_BYTES} bytes"
    return ""


def _shown(value: str) -> str:
    return repr(value) if len(value) <= 200 else f"{value[:100]!r}…"
