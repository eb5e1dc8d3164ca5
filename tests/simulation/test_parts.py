"""Sharded state over thousands of histories: never torn, never two versions in one world, never back behind what was
promised."""

from __future__ import annotations

import os

import pytest
from simulation.parts import World

HISTORIES = int(os.environ.get("ELASTIC_PART_HISTORIES", "2000"))


@pytest.mark.parametrize("block", range(4))
def test_all_go_on_from_one_version_and_lose_no_more_than_was_said(block: int) -> None:
    for seed in range(block, HISTORIES, 4):
        try:
            World(seed).play()
        except Exception as error:
            raise AssertionError(f"history {seed}: {error}") from error
