"""What the integrations of frameworks share, without a framework: data, schedule, versions."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from elastic.integrations import _data, _versions
from elastic.integrations._schedule import Schedule


def taken(steps: _data.Steps, step: int) -> list[int]:
    """Positions of all micro-batches of one rank, in order."""
    return [p for number in range(steps.parts) for p in range(*steps.part(step, number))]


@given(
    samples=st.integers(1, 60), batch=st.integers(1, 40), world=st.integers(1, 7), most=st.integers(1, 5),
    step=st.integers(0, 30),
)  # fmt: skip
def test_ranks_and_parts_take_each_sample_of_a_step_once(
    samples: int, batch: int, world: int, most: int, step: int
) -> None:
    parts = _data.parts_needed(batch, world, most)
    ranks = [_data.Steps(batch, parts, rank, world, samples) for rank in range(world)]
    whole = ranks[0].whole(step)
    assert whole.epoch == step // ranks[0].per_epoch
    assert [p for steps in ranks for p in taken(steps, step)] == list(range(whole.start, whole.stop))
    assert sum(sum(steps.sizes(step)) for steps in ranks) == whole.size
    assert all(size <= most for steps in ranks for size in steps.sizes(step))


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def load(data: Any, steps: _data.Steps, sampler: Any = None, **options: Any) -> Any:
    return _data.loader(data, steps, sampler=sampler, collate=list, seed=3, **{"first_step": 0, **options})


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler, None])
def test_an_epoch_is_the_same_samples_in_any_world(kind: Any) -> None:
    """70 samples in steps of 16: the last step has 6, and some micro-batches none."""
    data = Numbers(70)
    sampler = kind(data) if kind else None
    seen = []
    for world in (1, 2, 3, 8):
        found: dict[int, list[int]] = {}
        for rank in range(world):
            steps = _data.Steps(16, _data.parts_needed(16, world, 4), rank, world, 70)
            loader = load(data, steps, sampler)
            loader.set_epoch(1)
            batches = list(loader)
            assert len(batches) == len(loader) == 5 * steps.parts
            for number, batch in enumerate(batches):
                step, part = divmod(number, steps.parts)
                size = steps.sizes(step + 5)[part]
                assert len(batch) == max(size, 1)  # an empty one has a stand-in
                found.setdefault(step, []).extend(batch[:size])
        assert sorted(itertools.chain(*found.values())) == list(range(70))
        seen.append(found)
    assert all(found == seen[0] for found in seen)


def test_another_samplers_order_is_a_function_of_seed_and_epoch() -> None:
    data, steps = Numbers(40), _data.Steps(10, 1, 0, 1, 30)
    orders = []
    for _ in range(2):
        torch.rand(1)  # whatever was drawn before
        loader = load(data, steps, WeightedRandomSampler([1.0] * 40, 30))
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            orders.append(list(loader))
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
    with pytest.raises(ValueError, match="yields 30 samples in epoch 0, not 40"):
        _data.order_of(WeightedRandomSampler([1.0] * 40, 30), 40, seed=3)(0)


def test_a_sampler_with_a_generator_of_its_own_draws_the_same_in_each_epoch_wherever_that_is_entered() -> None:
    def orders(*epochs: int) -> list[list[int]]:
        sampler = WeightedRandomSampler([1.0] * 40, 40, generator=torch.Generator().manual_seed(7))
        made = _data.order_of(sampler, 40, seed=3)
        return [list(made(epoch)(0, 40)) for epoch in epochs]

    assert orders(0, 1, 2)[2] == orders(2)[0]
    assert orders(0)[0] != orders(1)[0]


@pytest.mark.parametrize(("replicas", "fits"), [(1, True), (2, False)])
def test_a_sampler_that_is_one_ranks_share_already_is_refused(replicas: int, fits: bool) -> None:
    sampler = DistributedSampler(Numbers(40), num_replicas=replicas, rank=0)
    if fits:
        assert sorted(_data.order_of(sampler, 40, seed=3)(0)(0, 40)) == list(range(40))
        return
    with pytest.raises(ValueError, match=r"DistributedSampler\(num_replicas=2\).*give the dataset without it"):
        _data.order_of(sampler, 20, seed=3)


def test_skipped_steps_are_not_loaded() -> None:
    loaded = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    loader = load(Watched(40), _data.Steps(10, 2, 0, 1, 40))
    loader.set_epoch(0, 3)
    assert list(loader) == [[30, 31, 32, 33, 34], [35, 36, 37, 38, 39]]
    assert loaded == list(range(30, 40))


def test_a_stream_goes_on_where_it_was_in_any_world() -> None:
    """7 samples an epoch, 4 a step: epochs follow each other without a gap."""
    whole = list(itertools.islice(itertools.cycle(range(7)), 40))
    for world in (1, 3):
        found: dict[int, list[int]] = {}
        for rank in range(world):
            steps = _data.Steps(4, _data.parts_needed(4, world, 2), rank, world, None)
            for number, batch in enumerate(itertools.islice(load(Stream(7), steps, first_step=6), 10 * steps.parts)):
                step, part = divmod(number, steps.parts)
                if step < 6:
                    assert batch is None
                else:
                    found.setdefault(step, []).extend(batch[: steps.sizes(step)[part]])
        assert found == {step: whole[4 * step : 4 * step + 4] for step in range(6, 10)}


def test_an_empty_stream_is_an_error_and_not_a_loop() -> None:
    with pytest.raises(ValueError, match="yields no sample in epoch 0"):
        next(iter(load(Stream(0), _data.Steps(4, 1, 0, 1, None), first_step=0)))


def make(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def test_a_schedule_made_late_goes_on_from_what_was_loaded() -> None:
    def one() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.8)

    first, optimizer = Schedule(), one()
    assert first.state_dict() == {}
    scheduler = first.make(lambda: make(optimizer), optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    second, other = Schedule(), one()
    other.load_state_dict(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    again = second.make(lambda: make(other), other)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    for optim, sched in ((optimizer, scheduler), (other, again)):
        optim.step()
        sched.step()
    assert again.get_last_lr() == scheduler.get_last_lr()
    second.load_state_dict({})  # back to before the first step
    assert second.made is None


@pytest.mark.parametrize(
    ("found", "fits"),
    [("1.15.0", True), ("1.20", True), ("1.14.9", False), ("2.0.0", False), ("2.0.0.dev0", False), (None, False)],
)
def test_versions_outside_the_range_are_refused_with_the_cure(found: str | None, fits: bool) -> None:
    said = _versions.complaint("accelerate", found, "1.15", "2")
    assert (said == "") == fits
    if not fits:
        assert "accelerate>=1.15,<2" in said
        assert "pip install 'elasticd[accelerate]'" in said
        assert (found or "not installed") in said


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_an_absent_framework_is_named_at_the_import() -> None:
    with pytest.raises(ImportError, match=r"transformers needs transformers>=5\.20,<6, which is not"):
        importlib.import_module("elastic.integrations.transformers")
