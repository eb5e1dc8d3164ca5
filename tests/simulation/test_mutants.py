"""Each planted mistake is caught, by a golden scenario or by a random history."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from simulation.histories import draw, play
from simulation.mutants import MUTANTS, Mutant, planted
from simulation.player import FILES, Player
from simulation.run import silent

TRIES = 1500


@pytest.fixture
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


def caught_by(mutant: Mutant) -> str:
    """What catches it first; empty when nothing does."""
    with planted(mutant):
        for seed in range(TRIES):
            if failure := play(draw(seed)).failure:
                return f"seed {seed}: {failure}"
        for path in FILES:
            try:
                if Player().play(path.read_text()) != path.read_text():
                    return path.name
            except AssertionError as error:
                return f"{path.name}: {error}"
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_is_caught(mutant: Mutant, quiet: None) -> None:
    by = caught_by(mutant)
    print(f"{mutant.name}: {by}")
    assert by, f"{TRIES} histories and {len(FILES)} scenarios, and nobody noticed: {mutant.name}"


def test_mistakes_are_gone_afterwards(quiet: None) -> None:
    with planted(MUTANTS[0]):
        pass
    assert not any(play(draw(seed)).failure for seed in range(20))
