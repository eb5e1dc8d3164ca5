"""Whether a script compiles, and whether `python -m MODULE` would find its module: checked by the interpreter that is
to run it, without running anything of it."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping

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
    said = _asked(python, _LOOK, module, workdir, {**os.environ, **env})
    return said if "\n" not in said else ""  # more lines: a traceback


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
