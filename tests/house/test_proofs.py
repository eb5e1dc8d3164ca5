"""What the documents call a proof is there: every test, folder and benchmark that a table names."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest
from support.source import ROOT, modules, where

PAGES = ("docs/failures.md", "docs/guarantees.md", "docs/security.md")
_NAMED = re.compile(r"`((?:[a-z]+/)(?:test_\w+\.py)?)(?:::(\w+))?`")
"""`chaos/test_exit.py`, `contract/`, `chaos/test_exit.py::test_undisturbed`."""


def named(page: str) -> list[tuple[str, str]]:
    """(path below tests/, test or '') for every proof that a table of this page names."""
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    found = [match for row in rows for match in _NAMED.findall(row)]
    return [(path, test) for path, test in found if path.startswith(tuple(f"{f.name}/" for f in _folders()))]


def _folders() -> list[pathlib.Path]:
    return [path for path in (ROOT / "tests").iterdir() if path.is_dir()]


def missing(path: str, test: str) -> str:
    file = ROOT / "tests" / path
    if not file.exists():
        return f"tests/{path} does not exist"
    if not test:
        return ""
    there = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
    return "" if test in there else f"tests/{path} has no {test}"


@pytest.mark.parametrize("page", PAGES)
def test_every_proof_that_is_named_exists(page: str) -> None:
    found = named(page)
    assert len(found) > 5, "the table was not read"
    assert not [why for path, test in found if (why := missing(path, test))]


def test_a_wrong_name_is_seen() -> None:
    assert missing("chaos/test_exit.py", "test_undisturbed") == ""
    assert missing("chaos/test_exit.py", "test_nothing_of_the_kind")
    assert missing("chaos/test_nowhere.py", "")


def runs_in_make_test(path: str) -> bool:
    """Whether a file below tests/ has a test that is not marked long."""
    found = ast.parse((ROOT / "tests" / path).read_text()).body
    tests = [n for n in found if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return any("pytest.mark.long" not in map(ast.unparse, test.decorator_list) for test in tests)


def test_make_test_proves_every_guarantee_with_real_processes() -> None:
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text().splitlines() if re.match(r"\| G\d", line)]
    assert len(rows) == 10
    real = ("agent/test_", "chaos/test_", "systemd/test_", "soak/test_")
    for row in rows:
        named = [path for path, _ in _NAMED.findall(row) if path.startswith(real)]
        assert any(map(runs_in_make_test, named)), row[:6]
    assert not runs_in_make_test("chaos/test_demo.py")


def test_every_row_of_faults_names_its_proof() -> None:
    rows = [line.strip("| ").split("|") for line in (ROOT / "docs/failures.md").read_text().splitlines()]
    faults = [cells for cells in rows if len(cells) == 4 and cells[0].strip() not in ("fault", "---")]
    assert len(faults) > 20
    assert not [cells[0] for cells in faults if not _NAMED.search(cells[3])]


def test_every_defect_names_who_found_it_and_the_test_that_finds_it_today() -> None:
    table = (ROOT / "docs/guarantees.md").read_text().partition("\n## Found by\n")[2].partition("\n## ")[0]
    kinds = []
    for row in re.findall(r"^\| ((?!kind |---).*) \|$", table, re.MULTILINE):
        kind, _, found_by, proof = row.split(" | ")
        kinds.append(kind)
        assert found_by.partition(",")[0] in ("review", "simulation", "soak", "faults", "tests"), row
        assert [bool(test) for _, test in _NAMED.findall(proof)] == [True], row
    order = ["state", "recovery", "authority", "service"]
    assert len(kinds) > 20
    assert kinds == sorted(kinds, key=order.index)


_PLACE = re.compile(r"((?:[a-z_]+/)+[a-z_]+\.(?:py|md))(?:::(\w+))?")
INTRODUCTIONS = (
    "docs/architecture.md",
    "docs/design.md",
    "docs/states.md",
    "CONTRIBUTING.md",
    "elastic/recovery/README.md",
)


@pytest.mark.parametrize("page", INTRODUCTIONS)
def test_every_place_that_an_introduction_names_exists(page: str) -> None:
    places = set(_PLACE.findall((ROOT / page).read_text()))
    assert len(places) > 1
    absent = []
    for path, name in places:
        below = (ROOT, ROOT / "elastic", ROOT / "tests", (ROOT / page).parent)
        file = next((folder / path for folder in below if (folder / path).is_file()), None)
        if file is None:
            absent.append(f"{path} does not exist")
        elif name:
            kinds = ast.FunctionDef | ast.ClassDef
            there = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, kinds)}
            absent += [] if name in there else [f"{path} has no {name}"]
    assert not absent


def test_the_architecture_names_every_package() -> None:
    rows = re.findall(r"^\| `([a-z_/]+)/` \| ", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    packages = {where(path.parent) for path in modules().values() if path.name == "__init__.py"}
    assert set(rows) == packages - {"daemon", "elastic"}
