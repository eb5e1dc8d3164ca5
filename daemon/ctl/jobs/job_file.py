"""From command-line input to a job's description: files, options, relative paths."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticd.base import dotted
from elasticd.base.dotted import Raw
from elasticd.ctl.client import Failed

LOOK_S = 10.0

_LOOK = """
import importlib.machinery, importlib.util, sys
parts, path = sys.argv[1].split("."), None
for i, part in enumerate(parts + ["__main__"]):
    name = ".".join((parts + ["__main__"])[: i + 1])
    if path is None and i:
        if i < len(parts):
            sys.exit(f"{'.'.join(parts[:i])} is a module and no package, so there is no {name} in it")
        break
    spec = importlib.util.find_spec(name) if path is None else importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        sys.exit(f"there is no module {name}" if i < len(parts) else f"{sys.argv[1]} is a package without __main__.py")
    if i < len(parts) and spec.origin and spec.origin.endswith("__init__.py"):
        with open(spec.origin, errors="replace") as file:
            if "__path__" in file.read():
                break  # it says itself where its modules are, and would have to be imported
    path = spec.submodule_search_locations
print("found")
"""


_COMPILE = """
import sys, traceback
with open(sys.argv[1], "rb") as file:
    source = file.read()
try:
    compile(source, sys.argv[1], "exec", dont_inherit=True)
except (SyntaxError, ValueError) as error:
    sys.exit("".join(traceback.format_exception_only(type(error), error)))
"""


def uncompiled(script: str, python: str) -> str:
    """Why `python script` would fail before its first line; '' if it would not, or if that cannot be determined here.
    The whole text that Python prints for it."""
    if script.endswith((".zip", ".pyz", ".pyc")):
        return ""
    try:
        with open(script, "rb") as file:
            source = file.read()
    except (OSError, ValueError):
        return ""
    if source[:2] == b"#!" and b"python" not in source.partition(b"\n")[0]:
        return f"is no Python script by its first line: elasticctl run --no-python -- {script}"
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, script, "exec", dont_inherit=True)
        return ""
    except (SyntaxError, ValueError) as error:
        why = "".join(traceback.format_exception_only(type(error), error))
    if script.endswith((".sh", ".bash")):
        return f"is no Python script: elasticctl run --no-python -- {script}"
    # A newer interpreter may know what ours does not.
    if python != sys.executable:
        why = _asked(python, _COMPILE, script, "", os.environ)
    return f"Python cannot compile it:\n{why.rstrip()}" if why else ""


def missing(module: str, python: str, workdir: str, env: Mapping[str, str]) -> str:
    """Why `python -m module` would fail at once; '' if it would not, or if that cannot be determined here."""
    error = _asked(python, _LOOK, module, workdir, {**os.environ, **env})
    return error if "\n" not in error else ""  # more lines: a traceback


def _asked(python: str, program: str, about: str, workdir: str, env: Mapping[str, str]) -> str:
    """What `program`, run by that interpreter, ends with as its error; '': none, or it cannot be run here."""
    surroundings = {k: v for k, v in env.items() if k != "PYTHONSTARTUP"}
    try:
        done = subprocess.run(
            [python, "-c", program, about], cwd=workdir or None, env=surroundings, capture_output=True, text=True,
            errors="replace", timeout=LOOK_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return done.stderr.strip() if done.returncode == 1 else ""


class InvalidJob(Failed):
    """The input is not a valid job; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def from_file(path: Path) -> Raw:
    """Read job.toml. Without a `name`, the file's own name is used."""
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidJob(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJob(f"{path}: is not TOML: {error}") from None
    except ValueError as error:  # a NUL in the path
        raise InvalidJob(f"{str(path)!r}: {error}") from None
    for field, value in dotted.leaves(raw):
        if not _is_json(value):
            raise InvalidJob(f"{path}: {field} = {value}: no field is a date: write a text in quotes")
    raw.setdefault("name", job_name(path.stem))
    return raw


def from_command(command: Sequence[str], module: bool, program: bool = False) -> Raw:
    """['train.py', '--lr', '1'] -> the first fields of the job."""
    if module and program:
        raise InvalidJob("--no-python and --module: the command is a program or a Python module, give one of them")
    what, *args = command
    if not program and not module and (hint := _instead(what)) and ("/" in what or not os.path.isfile(what)):
        raise InvalidJob(f"script = {what!r}: {hint}")
    key = "program" if program else "module" if module else "script"
    return {key: what, "args": args, "name": job_name(Path(what).stem if not module else what)}


def _instead(what: str) -> str:
    """What to write in place of a launcher before the script; '': it is none."""
    launcher = Path(what).name
    if re.fullmatch("python[0-9.]*", launcher):
        return "the script comes first, as in: elasticctl run train.py; another interpreter: --python PATH"
    if launcher in ("torchrun", "accelerate", "deepspeed", "mpirun", "srun"):
        return "elasticctl starts the workers: elasticctl run --workers N train.py (torchrun's options are accepted)"
    return ""


def override(raw: Raw, settings: Iterable[str]) -> None:
    """Apply 'checkpoint.keep=5' and the like. A value is parsed as TOML, else taken as text; in `env` always as
    text."""
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidJob(f"--set {text}: write FIELD=VALUE, as in checkpoint.keep=5")
        if name.strip().startswith("env."):
            environment(raw, [f"{name.strip().removeprefix('env.')}={value}"])
        else:
            read = dotted.value_of(value)
            put(raw, name.strip(), read if _is_json(read) else value)


def environment(raw: Raw, pairs: Iterable[str]) -> None:
    """Apply 'LR=0.1': everything after the first '=' is the value, unchanged. 'LR' alone: the shell's value."""
    env = raw.setdefault("env", {})
    if not isinstance(env, dict):
        raise InvalidJob(f"env = {env!r}: expected a table [env]")
    shell = dict(os.environ)  # itself it raises for names that are no text
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name:
            raise InvalidJob(f"-e {pair!r}: write NAME=VALUE, or NAME to pass on the shell's value")
        if not equals and name not in shell:
            raise InvalidJob(
                f"-e {pair}: there is no variable {name!r} in this shell: export it, or write {name}=VALUE"
            )
        env[name] = value if equals else shell[name]


def put(raw: Raw, name: str, value: Any) -> None:
    if name.count(".") > 1:
        raise InvalidJob(f"{name[:200]}: no such field")
    try:
        dotted.put(raw, name, value)
    except ValueError as error:
        raise InvalidJob(f"{name}: {error}") from None


def resolve(raw: Raw, here: Path) -> None:
    """Make paths absolute, relative to `here`: the daemon runs elsewhere. Files to be run must exist. A field that is
    not text is left unchanged: the daemon refuses it by name."""
    given = raw.get("workdir") or "."
    if isinstance(given, str):
        raw["workdir"] = str(_absolute("workdir", given, here))
        if not os.path.isdir(raw["workdir"]):
            raise InvalidJob(f"workdir = {given!r}: there is no such folder: {raw['workdir']}")
    if isinstance(script := raw.get("script"), str) and script:
        raw["script"] = _script(script, here, str(raw.get("workdir")))
    if isinstance(program := raw.get("program"), str) and program:
        raw["program"] = _program(program, here)
    if isinstance(python := raw.get("python"), str) and "/" in python:
        raw["python"] = str(_absolute("python", python, here, follow=False))
        if not os.access(raw["python"], os.X_OK) or os.path.isdir(raw["python"]):
            raise InvalidJob(f"python = {python!r}: there is no such program: {raw['python']}")
    if isinstance(env_file := raw.get("env_file"), str) and env_file:
        raw["env_file"] = str(_absolute("env_file", env_file, here))
        if not os.path.isfile(raw["env_file"]):
            raise InvalidJob(f"env_file = {env_file!r}: there is no such file: {raw['env_file']}")
    if isinstance(folder := raw.get("tensorboard"), str) and folder:
        raw["tensorboard"] = str(_absolute("tensorboard", folder, here))
    checkpoint = raw.get("checkpoint")
    if isinstance(checkpoint, dict) and isinstance(folder := checkpoint.get("dir"), str) and folder:
        checkpoint["dir"] = str(_absolute("checkpoint.dir", folder, here))


def _script(script: str, here: Path, workdir: str) -> str:
    for base in (here, Path(workdir)):
        path = _absolute("script", script, base)
        if os.path.isfile(path):
            return str(path)
        if os.path.isdir(path):
            raise InvalidJob(f"script = {script!r}: is a folder: name a file in it, or run a package with -m")
    raise InvalidJob(f"script = {script!r}: there is no such file in {here}")


DAEMONS_OWN = "daemon"
"""What --python takes for the interpreter of the daemon."""


def interpreter(given: str | None, daemons: str) -> str:
    """The interpreter of a job that `run` submits; '': the daemon's own. Without --python the one that runs elasticctl,
    if that is in a virtual environment: it is where the user has installed what the script imports."""
    if given is not None:
        return "" if given == DAEMONS_OWN else given
    return sys.executable if sys.prefix != sys.base_prefix and sys.executable != daemons else ""


def _program(program: str, here: Path) -> str:
    """The path of a program, as this shell would find it."""
    if "/" not in program:
        if (on_path := shutil.which(program)) is not None:
            return os.path.abspath(on_path)
        hint = f": write ./{program}" if os.path.isfile(here / program) else ""
        raise InvalidJob(f"program = {program!r}: there is no such program on PATH{hint}")
    path = _absolute("program", program, here, follow=False)
    if not os.path.isfile(path):
        raise InvalidJob(f"program = {program!r}: there is no such file: {path}")
    if not os.access(path, os.X_OK):
        raise InvalidJob(f"program = {program!r}: is not executable: chmod +x it, or name its interpreter before it")
    return str(path)


def check_source(raw: Raw, python: str) -> None:
    """Raise InvalidJob for a script that its interpreter cannot compile, and for a module that it does not find.
    `python`: interpreter of a job that names none."""

    module, given, env = raw.get("module"), raw.get("python") or python, raw.get("env") or {}
    script = raw.get("script")
    if isinstance(script, str) and script and isinstance(given, str) and (why := uncompiled(script, given)):
        raise InvalidJob(f"script = {script!r}: {why}")
    if not (isinstance(module, str) and module and isinstance(given, str) and isinstance(env, dict)):
        return
    texts = {name: value for name, value in env.items() if isinstance(value, str)}
    if why := missing(module, given, str(raw.get("workdir") or ""), texts):
        raise InvalidJob(f"module = {module[:200]!r}: {given} -m would fail in {raw.get('workdir')}: {why[:500]}")


def number(text: str) -> int | str:
    """'2' -> 2; other text is unchanged, to be refused by name."""
    return int(text) if re.fullmatch("[0-9]{1,30}", text) else text


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, or with the first free number appended."""
    taken_names = set(taken)
    if wanted not in taken_names:
        return wanted
    return next(name for n in range(2, len(taken_names) + 3) if (name := f"{wanted}-{n}") not in taken_names)


def other_job(folder: Path, job: str) -> str:
    """The job of the newest checkpoint in `folder`, where there are some and none of `job`'s; empty: there are not."""
    found: dict[int, str] = {}
    for path in folder.glob("step-*/manifest.json"):
        try:
            body = json.loads(path.read_bytes())["body"]
            found[int(body["step"])] = str(body["job"])
        except (OSError, ValueError, KeyError, TypeError):  # of another program, or damaged: the job will say so
            continue
    return found[max(found)] if found and job not in found.values() else ""


def _absolute(field: str, text: str, here: Path, follow: bool = True) -> Path:
    try:
        path = here / Path(text).expanduser()
        return path.resolve() if follow else Path(os.path.abspath(path))
    except (OSError, ValueError, RuntimeError) as error:  # too long; a NUL; an unknown user; a ring of links
        raise InvalidJob(f"{field} = {text[:200]!r}: {error}") from None


def job_name(text: str) -> str:
    """`text` with the characters that a job's name may have."""
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text.lower())
    return cleaned.strip("._-")[:60] or "job"


def _is_json(value: Any) -> bool:
    """Whether JSON can hold it: TOML also has dates and times."""
    try:
        json.dumps(value)
    except (TypeError, RecursionError):
        return False
    return True
