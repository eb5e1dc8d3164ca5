"""Modules and functions stay small enough to be read at one go."""

from __future__ import annotations

import ast
import collections

from support.source import ROOT, modules, tracked, tree, where

MAX_LINES = 600
MAX_FUNCTION = 60
MAX_ENTRIES = 16


def long_functions(module: ast.Module) -> list[tuple[str, int]]:
    """(name, lines) of each function that is too long."""
    functions = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [(name, lines) for name, lines in sizes if lines > MAX_FUNCTION]


def test_modules_are_short() -> None:
    sizes = {where(path): len(path.read_text().splitlines()) for path in modules().values()}
    assert not {name: lines for name, lines in sizes.items() if lines > MAX_LINES}


def test_folders_are_short() -> None:
    """As a listing shows them: modules, packages and other files."""
    entries: dict[str, set[str]] = collections.defaultdict(set)
    for path in tracked():
        parts = path.relative_to(ROOT).parts
        for depth in range(1, len(parts)) if parts[0] in ("daemon", "elastic") else ():
            entries["/".join(parts[:depth])].add(parts[depth])
    assert {"daemon", "elastic"} < entries.keys()
    assert not {folder: len(names) for folder, names in entries.items() if len(names) > MAX_ENTRIES}


def test_functions_are_short() -> None:
    found = {where(path): long for path in modules().values() if (long := long_functions(tree(path)))}
    assert not found


def test_the_check_of_functions_sees_a_long_one() -> None:
    source = "def f():\n" + "    pass\n" * MAX_FUNCTION + "\ndef g():\n" + "    pass\n" * (MAX_FUNCTION - 1)
    assert long_functions(ast.parse(source)) == [("f", MAX_FUNCTION + 1)]
