"""Which modules a script imports at its very top: the zygote imports them ahead, so that a new worker has them.

Only imports before any other statement count. A script that first sets an environment variable, or chooses a back end,
does so for the imports that follow: importing those earlier would change their behaviour. Only modules of Python itself
and of installed packages count, up to the first import of the job's own files: those may have any effect, and may
change between two starts.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence

from elastic.contract.worker.messages import PROGRAM

OURS = "elastic"
"""The zygote imports it anyway."""
INTEGRATIONS = "elastic.integrations"
"""But not these: each imports a framework, which takes seconds."""


def preloads(argv: Sequence[str], workdir: str, skip: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Modules to import ahead for ``python ARGV`` in `workdir`, in the script's order -> the names that the script
    imports from each. Some packages, such as transformers, load a part of theirs only when a name in it is used."""
    if "*" in skip or not argv or argv[0] == PROGRAM:
        return {}
    path = _module_file(argv[1], workdir) if argv[0] == "-m" and len(argv) > 1 else os.path.join(workdir, argv[0])
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # the worker reports the error
        return {}
    modules: dict[str, tuple[str, ...]] = {}
    for name, names in _leading_imports(tree.body):
        top = name.partition(".")[0]
        if {name, top} & set(skip) or (top == OURS and not f"{name}.".startswith(f"{INTEGRATIONS}.")):
            continue
        if top != OURS and not _is_installed(top):
            break  # a file of the job may have any effect, like any other statement
        modules[name] = (*modules.get(name, ()), *names)
    return modules


def _leading_imports(body: Sequence[ast.stmt]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names imported from it)"""
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from ((alias.name, ()) for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                if module != "__future__":
                    yield module, tuple(alias.name for alias in names if alias.name != "*")
            case ast.Try(body=tried) if all(isinstance(s, ast.Import | ast.ImportFrom) for s in tried):
                yield from _leading_imports(tried)
            case ast.Expr(value=ast.Constant()):
                pass  # the docstring
            case _:
                return


def _module_file(name: str, workdir: str) -> str:
    """The source of ``-m NAME``, found without importing its packages; '' if it is not a plain file."""
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [workdir, *sys.path])
    if spec is None:
        return ""
    for folder in spec.submodule_search_locations or ():
        for path in (os.path.join(folder, *rest) + ".py", os.path.join(folder, *rest, "__main__.py")):
            if os.path.isfile(path):
                return path
    return (spec.origin or "") if not rest else ""


def _is_installed(top: str) -> bool:
    """Whether the module is part of Python or of an installed package."""
    if top in sys.builtin_module_names:
        return True
    spec = importlib.machinery.PathFinder.find_spec(top)
    if spec is None:
        return False
    places = [os.path.realpath(p) + os.sep for p in {*sysconfig.get_paths().values()}]
    found = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    return any(os.path.realpath(f).startswith(tuple(places)) for f in found)
