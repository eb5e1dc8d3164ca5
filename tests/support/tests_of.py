"""Test files that import a module of one package: `python -m support.tests_of elastic/worker/state`."""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

from support.source import FOLDERS, ROOT


def imported(path: pathlib.Path) -> Iterator[str]:
    """Dotted names, `from x import y` as both `x` and `x.y`: y may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module(place: str) -> str:
    """Import name of a folder or file of the source. Raises SystemExit where there is none."""
    path = ROOT / place.rstrip("/")
    for package, folder in FOLDERS.items():
        if path.exists() and folder in path.parents:
            return ".".join((package, *path.relative_to(folder).with_suffix("").parts))
    raise SystemExit(f"PLACE={place}: no folder or file below daemon/ or elastic/, such as elastic/worker/state")


def tests_of(place: str) -> list[str]:
    """Paths of test files, from the root of the source."""
    name = module(place)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in files
        if any(f"{each}.".startswith(f"{name}.") for each in imported(path))
    ]


if __name__ == "__main__":
    print(*tests_of(sys.argv[1] if len(sys.argv) > 1 else ""))
