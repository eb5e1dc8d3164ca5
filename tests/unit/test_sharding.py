"""The step is the data position: exactly once, whatever the worlds were."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.data.sharding import BatchPlan, SampleOrder, derive, micro_sizes, rank_range


@given(
    samples=st.integers(1, 400),
    batch_size=st.integers(1, 90),
    world_sizes=st.lists(st.integers(1, 7), min_size=1, max_size=50),
    epochs=st.integers(1, 3),
    seed=st.integers(),
)
def test_each_sample_of_an_epoch_is_taken_once_over_any_sequence_of_worlds(
    samples: int, batch_size: int, world_sizes: list[int], epochs: int, seed: int
) -> None:
    plan = BatchPlan(samples, batch_size)
    taken: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for step in range(epochs * plan.steps_per_epoch):
        batch, world_size = plan.at(step), world_sizes[step % len(world_sizes)]
        order = SampleOrder(samples, seed, batch.epoch)
        for rank in range(world_size):
            taken[batch.epoch].update(order.take(*rank_range(batch.start, batch.stop, rank, world_size)))
    for counts in taken.values():
        assert counts == Counter(range(samples))


@given(start=st.integers(0, 1000), size=st.integers(0, 300), world_size=st.integers(1, 40))
def test_shares_are_contiguous_and_even(start: int, size: int, world_size: int) -> None:
    parts = [rank_range(start, start + size, rank, world_size) for rank in range(world_size)]
    assert parts[0][0] == start
    assert parts[-1][1] == start + size
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    sizes = [stop - first for first, stop in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # rank 0 is never the empty one


@given(size=st.integers(0, 500), most=st.one_of(st.none(), st.integers(1, 60)))
def test_micro_batches_are_even_few_and_within_the_limit(size: int, most: int | None) -> None:
    parts = micro_sizes(size, most)
    assert sum(parts) == size
    assert max(parts) - min(parts) <= 1
    assert len(parts) >= 1
    if most is not None and size > 0:
        assert max(parts) <= most
        assert len(parts) == -(-size // most)


@given(samples=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_an_order_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    assert sorted(SampleOrder(samples, seed, epoch).take(0, samples)) == list(range(samples))


def test_orders_look_shuffled() -> None:
    """Every sample is about equally often at every place (chi-square, fixed seeds, far tails)."""
    samples, epochs = 11, 4400
    places = Counter((place, SampleOrder(samples, 7, e)[place]) for e in range(epochs) for place in range(samples))
    expected = epochs / samples
    chi2 = sum((places[p, s] - expected) ** 2 / expected for p in range(samples) for s in range(samples))
    assert 50 < chi2 < 170  # 100 degrees of freedom: mean 100, standard deviation 14
    # Neighbours do not stay neighbours.
    big = SampleOrder(100_003, 7, 0).take(0, 5000)
    assert sum(abs(a - b) == 1 for a, b in pairwise(big)) < 5
    assert abs(sum(big) / len(big) / 100_003 - 0.5) < 0.02


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {tuple(SampleOrder(50, seed, epoch).take(0, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_the_order_never_changes_between_versions() -> None:
    """Golden values: another order would make a resumed job repeat and skip samples."""
    assert SampleOrder(10, 1, 0).take(0, 10) == GOLDEN_TEN
    assert SampleOrder(10**8, 1, 3).take(10**8 - 2, 10**8) == GOLDEN_LARGE


GOLDEN_TEN = (7, 1, 0, 9, 2, 6, 8, 3, 4, 5)
GOLDEN_LARGE = (59619358, 79328973)


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert SampleOrder(9, 1, 2, shuffle=False).take(3, 7) == (3, 4, 5, 6)


def test_steps_and_epochs() -> None:
    plan = BatchPlan(10, 4)
    assert [plan.at(s).size for s in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [plan.at(s).epoch for s in range(6)] == [0, 0, 0, 1, 1, 1]
    assert plan.steps_per_epoch == 3


def test_wrong_arguments_are_named() -> None:
    for call, words in (
        (lambda: BatchPlan(0, 4), "samples = 0"),
        (lambda: BatchPlan(4, 0), "batch_size = 0"),
        (lambda: BatchPlan(4, 4).at(-1), "step = -1"),
        (lambda: rank_range(0, 4, 2, 2), "rank = 2"),
        (lambda: micro_sizes(4, 0), "micro_batch = 0"),
        (lambda: SampleOrder(2**63, 0, 0), "more than"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(IndexError):
        SampleOrder(4, 0, 0)[4]


def test_derived_seeds_depend_on_every_part() -> None:
    seeds = {derive(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert derive(1, 23) != derive(12, 3)
