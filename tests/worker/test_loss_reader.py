"""The loss of a GPU is read a step or more later: not that of a step which was undone meanwhile."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.worker.job import logged as loss_reader
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says otherwise."""

    is_cuda = True


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: Any = lambda shape, dtype, pin_memory: torch.zeros(shape, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(
        loss_reader, "torch", SimpleNamespace(Tensor=torch.Tensor, cuda=SimpleNamespace(Event=Event), empty=pinned)
    )


def loss(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(OnGpu)


@pytest.mark.usefixtures("gpu")
def test_a_loss_that_was_not_read_before_a_rollback_is_not_taken_for_one_after_it() -> None:
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    assert job._loss.read(loss(1.0)) is None
    assert job._loss.read(loss(math.nan)) == 1.0
    job.enter(rank=0, world_size=1, generation=2, checkpoint_scheduler=None)
    assert job._loss.read(loss(2.0)) is None
    assert job._loss.read(loss(3.0)) == 2.0


@pytest.mark.usefixtures("gpu")
def test_a_loss_of_one_element_is_read_whatever_its_shape() -> None:
    """As on the CPU, where `item()` reads it."""
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    assert job._loss.read(torch.tensor([1.0]).as_subclass(OnGpu)) is None
    assert job._loss.read(torch.tensor([[2.0]]).as_subclass(OnGpu)) == 1.0
