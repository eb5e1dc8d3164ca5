"""Whether `python -m MODULE` would find its module: checked by the interpreter that is to run it, without importing
it."""

from __future__ import annotations

import os
import subprocess
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


def missing(module: str, python: str, workdir: str, env: Mapping[str, str]) -> str:
    """Why `python -m module` would fail at once; '' if it would not, or if that cannot be determined here."""
    surroundings = {k: v for k, v in {**os.environ, **env}.items() if k != "PYTHONSTARTUP"}
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, module], cwd=workdir or None, env=surroundings, capture_output=True, text=True,
            errors="replace", timeout=LOOK_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    said = done.stderr.strip()
    return said if done.returncode == 1 and said and "\n" not in said else ""  # more lines: a traceback
