"""What holds for each test of the worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.arenas import Agent


@pytest.fixture(autouse=True)
def nothing_left_in_flight() -> Iterator[None]:
    """They belong to the process: an abort in a later test would fail these in place of its own."""
    yield
    if module := sys.modules.get("elastic.worker.comm.in_flight"):
        assert not module.IN_FLIGHT.fail("left behind by a test"), "a collective is still in flight"


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    for arena in made.arenas:
        arena.close()
