"""What `train` draws before a loop that seeds is the same at each entry; a loop that nothing seeds is named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from elastic.worker.data.seeds import UNSEEDED, Generators, seed_turn


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    monkeypatch.setattr(Generators, "seeded", False)
    return Generators()


def drawn() -> tuple[list[int], float, float]:
    return torch.randperm(20).tolist(), random.random(), float(np.random.rand())


def test_what_is_drawn_before_a_loop_that_seeds_is_the_same_at_each_entry(generators: Generators) -> None:
    generators.enter()
    first = drawn()
    seed_turn(1)
    assert generators.unseeded() == ""
    generators.enter()
    assert drawn() == first


def test_a_loop_that_nothing_seeds_does_not_draw_the_same_again(generators: Generators) -> None:
    generators.enter()
    first = drawn()
    generators.enter()
    assert drawn() != first


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_a_loop_that_draws_and_is_not_seeded_is_named_once(generators: Generators, draw: object) -> None:
    generators.enter()
    assert callable(draw)
    draw()
    assert generators.unseeded() == UNSEEDED
    assert generators.unseeded() == ""


def test_a_loop_that_draws_nothing_is_not_named(generators: Generators) -> None:
    generators.enter()
    assert generators.unseeded() == ""
