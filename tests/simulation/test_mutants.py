"""Each planted mistake is caught, by a golden scenario, by a random history or by the test that it names."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from simulation.histories import draw, family, late, play, starving
from simulation.mutants import MUTANTS, Mutant, planted
from simulation.player import FILES, Player
from simulation.run import silent
from support.wait import eventually

TRIES, FAMILY_TRIES, LATE_TRIES, STARVING_TRIES = 1500, 96, 48, 60
TESTS = Path(__file__).parent.parent


@pytest.fixture
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


def test_each_mutant_changes_todays_source() -> None:
    for mutant in MUTANTS:
        with planted(mutant):
            pass


def fails(test: str) -> bool:
    """Whether this test fails with any of its parameters. Fixtures are not passed to it."""
    path, name = test.split("::")
    spec = importlib.util.spec_from_file_location("caught_by_" + Path(path).stem, TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    rows = marks[0].args[1] if marks else [()]
    try:
        for row in rows:
            function(*(row if isinstance(row, tuple) else (row,)))
    except AssertionError:
        return True
    return False


def caught_by(mutant: Mutant) -> str:
    """What catches it first; empty when nothing does."""
    with planted(mutant):
        if mutant.test:
            return mutant.test if fails(mutant.test) else ""
        for drawn, tries in ((family, FAMILY_TRIES), (late, LATE_TRIES), (starving, STARVING_TRIES), (draw, TRIES)):
            for seed in range(tries):
                if failure := play(drawn(seed)).failure:
                    return f"{drawn.__name__} {seed}: {failure}"
        for path in FILES:
            try:
                if Player().play(path.read_text()) != path.read_text():
                    return path.name
            except AssertionError as error:
                return f"{path.name}: {error}"
    return ""


def _rows() -> Iterator[Any]:
    """Those that no named test catches are searched for in random histories, for up to a minute each."""
    for mutant in MUTANTS:
        yield pytest.param(mutant, marks=() if mutant.test else pytest.mark.long, id=mutant.name.replace(" ", "-"))


@pytest.mark.parametrize("mutant", list(_rows()))
def test_mutant_is_caught(mutant: Mutant, quiet: None) -> None:
    before = set(threading.enumerate())
    by = caught_by(mutant)
    print(f"{mutant.name}: {by}")
    eventually(lambda: not set(threading.enumerate()) - before, 10.0, "the end of all threads of the test that failed")
    assert by, f"{TRIES} histories and {len(FILES)} scenarios, and nobody noticed: {mutant.name}"


@pytest.mark.long  # those tests run anyway: here it is seen that they do so without pytest, too
@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS if mutant.test}))
def test_mutant_detecting_tests_pass_without_the_mutation(test: str, quiet: None) -> None:
    assert not fails(test)


def test_mistakes_are_gone_afterwards(quiet: None) -> None:
    with planted(MUTANTS[0]):
        pass
    assert not any(play(draw(seed)).failure for seed in range(20))
