"""A backward that waits for sums which gloo will never deliver is freed by an abort."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from elastic.worker.comm import comm_hooks, ddp, nccl
from elastic.worker.comm import group as groups
from elastic.worker.comm.errors import is_communication_error
from elastic.worker.comm.group import Backend, Group
from elastic.worker.comm.in_flight import IN_FLIGHT, InFlight


class Stuck:
    """A collective that does not end: as gloo's does whose send was kept back. `followed` is called once the backward's
    future follows it."""

    def __init__(self, followed: Callable[[], None]) -> None:
        self._followed = followed

    def get_future(self) -> Stuck:
        return self

    def add_done_callback(self, callback: object) -> None:
        self._followed()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def backward(model: nn.Module, failed: list[str]) -> None:
    wrapped = ddp.wrap(
        model, weight=lambda: 1.0, on_contributed=lambda: None, on_failed=lambda: failed.append("failed")
    )
    wrapped(torch.ones(2, 4)).sum().backward()


def test_a_backward_is_freed(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    flight, failed, found = InFlight(), list[str](), list[bool]()
    monkeypatch.setattr(comm_hooks, "IN_FLIGHT", flight)  # what another test has left in flight would be failed instead
    thread = threading.Thread(target=lambda: found.append(flight.fail("rank 1 died")))
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *args: Stuck(followed=thread.start))
    with pytest.raises(RuntimeError, match="rank 1 died") as caught:
        backward(nn.Linear(4, 4), failed)
    thread.join()
    assert (failed, found) == (["failed"], [True])
    assert is_communication_error(caught.value)


def test_in_flight_sums_equal_those_of_gloo(alone: None) -> None:
    model, failed = nn.Linear(4, 4), list[str]()
    backward(model, failed)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))
    assert (failed, IN_FLIGHT.fail("nothing is in flight")) == ([], False)


def test_in_flight_result_after_the_abort_is_ignored() -> None:
    flight, theirs, failed = InFlight(), torch.futures.Future[Any](), list[str]()
    ours = flight.follow(theirs, lambda done: done.value(), lambda: failed.append("failed"))
    assert flight.fail("aborted")
    theirs.set_result(torch.ones(1))
    with pytest.raises(RuntimeError, match="aborted"):
        ours.wait()
    assert failed == ["failed"]


def test_a_failure_of_gloos_reaches_the_backward() -> None:
    def raises(done: torch.futures.Future[Any]) -> torch.Tensor:
        raise RuntimeError("Connection closed by peer")

    flight, theirs = InFlight(), torch.futures.Future[Any]()
    ours = flight.follow(theirs, raises, lambda: None)
    theirs.set_result(None)
    with pytest.raises(RuntimeError, match="closed by peer"):
        ours.wait()
    assert not flight.fail("later")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_with_a_collective_that_does_not_end_is_never_destroyed(
    alone: None, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    """With nccl too: its group has gloo for tensors on the CPU, and whatever drops the last reference would wait."""
    kept = list[object]()
    monkeypatch.setattr(groups, "_ABANDONED", kept)
    monkeypatch.setattr(nccl, "communicators", list)
    group = Group(backend=backend, rank=0, world_size=1, store_host="127.0.0.1", store_port=9, generation=1)
    IN_FLIGHT.follow(torch.futures.Future(), lambda done: torch.ones(1), lambda: None)
    (formed,) = c10d._world.pg_map
    group.abort("a rank died")
    while not group._abandoned:
        assert group._sweeper is not None
        group._sweeper.join(0.01)
    group.close()
    assert kept == [formed]
    assert not dist.is_initialized()
