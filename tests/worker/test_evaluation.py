"""`job.evaluate`: the same sums for any world size, and nothing of the training loop is changed."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.job.evaluation import exact_sum
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

CPU = torch.device("cpu")
SAMPLES, BATCH = 37, 3


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws in `__getitem__`."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return torch.full((4,), i / 7) + torch.rand(4), torch.tensor(i % 2)


def build() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def alone(state: State) -> Job:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    state.watch_optimizers(job.guard())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    state.begin()
    return job


def measured(job: Job, state: State, model: nn.Module) -> dict[str, float]:
    def measure(batch: Any) -> dict[str, Any]:
        out = model(batch.x)
        assert not out.requires_grad
        right = (out.argmax(1) == batch.y).sum()
        return {"loss": F.cross_entropy(out, batch.y, reduction="sum"), "right": right, "drawn": torch.rand(())}

    return job.evaluate(state, Noisy(), measure, batch_size=BATCH)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=6))
def test_the_sum_does_not_depend_on_the_order(values: list[float]) -> None:
    assert len({exact_sum(order) for order in itertools.permutations(values)}) == 1


@pytest.mark.parametrize("values", [[1.0, math.inf], [math.inf, -math.inf], [math.nan, 1.0], [1e308, 1e308]])
def test_values_without_a_finite_sum_do_not_raise(values: list[float]) -> None:
    assert not math.isfinite(exact_sum(values))


def test_modes_generators_and_gradients_are_as_before() -> None:
    state = build()
    job = alone(state)
    model: Any = state.model
    model[1].eval()  # a frozen BatchNorm
    before = [module.training for module in model.modules()]
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    want = torch.rand(()).item(), random.random(), float(np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    measured(job, state, model)
    assert (torch.rand(()).item(), random.random(), float(np.random.rand())) == want
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    state.turned()  # nothing of the state was changed


def test_an_error_in_measure_leaves_modes_as_they_were() -> None:
    state = build()
    job = alone(state)

    def measure(batch: Any) -> dict[str, float]:
        assert not state.model.training
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        job.evaluate(state, Noisy(), measure, batch_size=BATCH)
    assert state.model.training
    assert torch.is_grad_enabled()


class Merging(nn.Linear):
    """As LoRA's layers: merged for evaluation, and taken apart again for training."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        self.merged = not mode
        return self


def test_a_module_that_does_more_than_set_the_mode_is_told_of_its_return() -> None:
    model = nn.Sequential(Merging(4, 2), Merging(2, 2))
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    job = alone(state)
    model[1].eval()
    measured(job, state, model)
    assert [(layer.training, layer.merged) for layer in model] == [(True, False), (False, True)]


def test_between_step_and_commit_it_is_refused() -> None:
    state = build()
    job = alone(state)
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    with pytest.raises(RuntimeError, match=r"between an optimizer's step and job.commit"):
        measured(job, state, state.model)
    job.commit(state)
    assert measured(job, state, state.model)["count"] == SAMPLES


@pytest.mark.parametrize(
    ("sums", "error", "said"),
    [
        ({"loss": torch.ones(3)}, TypeError, r"'loss' has shape \[3\]"),
        (1.0, TypeError, "returned float: return sums by name"),
        ({"count": 1}, ValueError, "'count' is the number of samples"),
    ],
)
def test_values_that_are_no_sums_are_refused(sums: Any, error: type[Exception], said: str) -> None:
    state = build()
    with pytest.raises(error, match=said):
        alone(state).evaluate(state, Noisy(), lambda batch: sums, batch_size=BATCH)


def on_ranks(rank: int, world_size: int, port: int) -> Any:
    """In a group, after a training forward that left each rank with buffers of its own."""
    group = formed(rank, world_size, port)
    state = build()
    job = Job(name="j", device=CPU, local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    state.begin()
    model = job.ddp(state.model)
    model(torch.full((2, 4), float(rank)))
    sums = measured(job, state, model)
    said = ""
    try:
        job.evaluate(state, Noisy(), lambda batch: {f"loss{rank}": 1.0}, batch_size=BATCH)
    except ValueError as error:
        said = str(error)
    few = job.evaluate(state, Noisy(), lambda batch: {"ones": batch.size}, batch_size=SAMPLES)
    group.close()
    return [sums, said, few]


@pytest.mark.slow
def test_any_world_size_gives_the_same_bits() -> None:
    """13 batches over 2 and 3 ranks, one batch over 3, with a DDP model whose BatchNorm each rank had changed."""
    state = build()
    job = alone(state)
    state.model(torch.zeros(2, 4))  # as rank 0 below, whose buffers all ranks get
    want = measured(job, state, state.model)
    assert want["count"] == SAMPLES
    for world_size in (2, 3):
        for sums, said, few in run_ranks(on_ranks, world_size=world_size):
            assert sums == want
            assert "other names elsewhere" in said
            assert few == {"ones": SAMPLES, "count": SAMPLES}
