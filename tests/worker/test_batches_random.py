"""Datasets that draw random numbers always, seldom or never: what a sample draws depends on its position alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset, Subset, default_collate

from elastic.worker.data import reading
from elastic.worker.data.batches import batches
from elastic.worker.data.draws import Draws
from elastic.worker.data.reading import Reader
from elastic.worker.data.seeds import seed_everything
from elastic.worker.data.sharding import BatchPlan

COUNT, BATCH = 96, 8


class Drawing:
    """`draws(index)` is added to each sample; counts how often each is read."""

    def __init__(self, draws: Callable[[int], float]) -> None:
        self.draws = draws
        self.reads = [0] * COUNT

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads[index] += 1
        return index, self.draws(index)


def seldom(draw: Callable[[], float]) -> Callable[[int], float]:
    return lambda index: draw() if index % 23 == 5 else 0.0


KINDS: dict[str, Callable[[int], float]] = {
    "never": lambda index: 0.0,
    "always": lambda index: random.random() + np.random.rand() + float(torch.rand(())),
    "python": seldom(random.random),
    "numpy": seldom(np.random.rand),
    "gauss": seldom(lambda: random.gauss(0, 1) + np.random.randn()),
    "torch": seldom(lambda: float(torch.rand(()))),
}


def read(dataset: Drawing, *, seeded: bool, collate: Callable[[list[Any]], Any] = default_collate) -> list[Any]:
    parts = Reader(dataset, collate, seed=3, plan=BatchPlan(COUNT, BATCH), shuffle=True)
    parts._random = seeded
    found = []
    for step in range(2 * COUNT // BATCH):
        found.append(parts[step][1])
        random.random(), np.random.randn(), torch.rand(())  # the loop draws, too
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_dataset_random_draws_equal_those_of_an_always_seeded_dataset(kind: str) -> None:
    ours, theirs = Drawing(KINDS[kind]), Drawing(KINDS[kind])
    for here, there in zip(read(ours, seeded=False), read(theirs, seeded=True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    again = sum(ours.reads) - sum(theirs.reads)
    assert again == 0 if kind in ("never", "always") else 0 < again <= BATCH, "one batch at most is read twice"


def test_a_collate_function_draws_as_ever() -> None:
    def mixed(samples: list[Any]) -> tuple[Any, float]:
        return default_collate(samples)[0], random.random() + np.random.rand() + float(torch.rand(()))

    ours = read(Drawing(KINDS["never"]), seeded=False, collate=mixed)
    theirs = read(Drawing(KINDS["never"]), seeded=True, collate=mixed)
    assert [drawn for _, drawn in ours] == [drawn for _, drawn in theirs]
    assert len({drawn for _, drawn in ours}) == len(ours), "and each batch's differ"


def test_a_dataset_that_draws_nothing_is_not_seeded_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(reading, "seed_from", seeds.append)
    monkeypatch.setattr(reading, "seed_turn", seeds.append)
    read(Drawing(KINDS["never"]), seeded=False)
    assert len(seeds) == 1 + 2 * COUNT // BATCH, "for the first sample, which is looked at closely, and for each step"


def test_training_loop_is_seeded_alike_whatever_the_dataset_does_with_the_generators() -> None:
    def seeds(index: int) -> float:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        return 0.0

    def loop(draws: Callable[[int], float], collate: Callable[[list[Any]], Any]) -> list[tuple[float, ...]]:
        class At:
            step = 0

        found, at = [], At()
        for _ in batches(Drawing(draws), at, batch_size=BATCH, rank=0, world_size=1, seed=3, epochs=1, collate=collate):
            found.append((random.random(), float(np.random.randn()), float(torch.rand(()))))
            at.step += 1
        return found

    expected = loop(KINDS["never"], default_collate)
    assert len(set(expected)) == COUNT // BATCH
    for draws in (*KINDS.values(), seeds, seldom(lambda: seeds(0))):
        assert loop(draws, default_collate) == expected
    assert loop(KINDS["never"], lambda samples: (default_collate(samples), random.random())) == expected


def test_each_draw_and_each_seed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[Callable[[], object]] = [
        random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn, lambda: torch.rand(()),
        lambda: torch.randn(()), lambda: random.seed(7), lambda: np.random.seed(7), lambda: torch.manual_seed(7),
    ]  # fmt: skip
    quick, exact = Draws(), Draws()
    assert quick._views is not None, "else each look takes 50 µs: where does this Python keep its generator?"
    monkeypatch.setattr(exact, "_views", None)
    for drawn in (quick, exact):
        for act in acts:
            seed_everything(3)
            drawn.mark()
            assert not drawn.any()
            act()
            assert drawn.any()
            for _ in range(1300):
                act()
                if act not in acts[-3:]:
                    assert drawn is exact or drawn.any()


def test_looking_for_draws_leaves_the_generators_as_they_were() -> None:
    seed_everything(4)
    random.gauss(0, 1), np.random.randn(), torch.randn(())  # each keeps a second number for later
    expected = random.gauss(0, 1), np.random.randn(), float(torch.randn(()))
    seed_everything(4)
    random.gauss(0, 1), np.random.randn(), torch.randn(())
    Draws().mark()
    assert (random.gauss(0, 1), np.random.randn(), float(torch.randn(()))) == expected


def test_draws_are_looked_for_on_the_cpu_whatever_the_default_device_is() -> None:
    """On a GPU the search would draw from its generator, which is not put back."""
    with torch.device("meta"):
        assert Draws()._views is not None


def test_draws_of_another_generator_in_the_place_of_pythons_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, other = Draws(), random.Random()
    for name in ("random", "seed", "getstate", "setstate", "gauss", "getrandbits"):  # as `importlib.reload` does
        monkeypatch.setattr(random, name, getattr(other, name))
    seed_everything(3)
    drawn.mark()
    assert not drawn.any()
    random.random()
    assert drawn.any()


def test_a_random_function_that_is_no_generators_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.5)
    drawn = Draws()
    seed_everything(3)
    drawn.mark()
    np.random.rand()
    assert drawn.any()


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample has a number that was drawn for it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


@pytest.mark.parametrize("kind", ["subset", "subset of a subset", "stacked"])
def test_what_a_subsets_samples_draw_is_the_same_for_any_world_size(kind: str) -> None:
    """torch's Subset has `__getitems__` also for a dataset that is read sample by sample."""
    whole = Numbered()
    data: Any = Subset(Subset(whole, range(30)) if kind == "subset of a subset" else whole, range(20))
    if kind == "stacked":
        data = StackDataset(whole)
    drawn = []
    for world_size in (1, 2, 3):
        found: dict[int, float] = {}
        for rank in range(world_size):
            state = SimpleNamespace(step=0)
            for batch in batches(data, state, batch_size=10, rank=rank, world_size=world_size):
                rows = batch.data[0] if kind == "stacked" else batch.data
                found |= {int(index): float(number) for index, number in rows}
                state.step += 1
        drawn.append(found)
    assert drawn[0] == drawn[1] == drawn[2]
