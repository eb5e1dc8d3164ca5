"""Tests run by `pytest` and by `python -m pytest`, which has the root of the source before everything."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

from support.source import ROOT

TESTS = ROOT / "tests"


def folders(place: pathlib.Path) -> set[str]:
    return {path.name for path in place.iterdir() if path.is_dir()}


def imported(text: str) -> set[str]:
    """The first names of all that is imported, but relatively."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


AMBIGUOUS = folders(ROOT) & folders(TESTS)
"""Folders of tests that hide behind one of the source, or hide it."""


def test_import_scan_finds_all_imports() -> None:
    assert "daemon" in AMBIGUOUS
    text = "import a.b\nfrom c import d\nfrom . import e\ndef f():\n    from g.h import i"
    assert imported(text) == {"a", "c", "g"}


def test_tests_import_no_ambiguous_top_level_module() -> None:
    wrong = [str(path) for path in sorted(TESTS.rglob("*.py")) if imported(path.read_text()) & AMBIGUOUS]
    assert not wrong, "what tests share stands in tests/support"


def test_every_public_name_of_elastic_is_there() -> None:
    """They are imported when they are first used, by paths in strings."""
    source = "import elastic; print(*[getattr(elastic, name) for name in elastic.__all__])"
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
