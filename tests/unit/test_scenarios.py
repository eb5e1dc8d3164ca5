"""Golden histories: tests/scenarios/*.txt. ELASTIC_REWRITE=1 rewrites them: read the diff. See `simulation.player`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest
import structlog
from simulation import diagram
from simulation.player import FILES, Player
from simulation.run import silent


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path: pathlib.Path) -> None:
    got = Player().play(path.read_text())
    if os.environ.get("ELASTIC_REWRITE"):
        path.write_text(got)
    assert got == path.read_text()


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 30, "one has gone: its promise is proven elsewhere, or not at all"


def test_the_state_diagrams_are_up_to_date() -> None:
    assert (pathlib.Path(__file__).parents[2] / "docs" / "states.md").read_text() == diagram.text()
