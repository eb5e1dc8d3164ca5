"""A backward that waits for sums which gloo will never deliver is freed by an abort."""

from __future__ import annotations

import ast
import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import elastic
from elastic.worker.comm import comm_hooks, ddp, in_flight, nccl
from elastic.worker.comm import group as groups
from elastic.worker.comm.errors import GroupAborted, is_communication_error
from elastic.worker.comm.group import Backend, Group
from elastic.worker.comm.in_flight import IN_FLIGHT, InFlight, complete
from elastic.worker.link.link import Link

SOURCE = pathlib.Path(elastic.__file__).parent


class Stuck:
    """A collective that does not end: as gloo's does whose send was kept back. `awaited` is called once the backward
    waits for it, itself or by a future."""

    def __init__(self, awaited: Callable[[], None]) -> None:
        self._awaited: Callable[[], None] | None = awaited

    def get_future(self) -> Stuck:
        return self

    def add_done_callback(self, callback: object) -> None:
        self._waits()

    def wait(self, timeout: timedelta) -> None:
        self._waits()
        time.sleep(timeout.total_seconds() / 10)
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False

    def _waits(self) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def backward(model: nn.Module, weight: ddp.GradientWeight, **options: Any) -> None:
    wrapped = ddp.wrap(model, weight=weight, link=Link(), **options)
    wrapped(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_a_backward_is_freed(alone: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    flight, weight, found = InFlight(), ddp.GradientWeight(), list[bool]()
    monkeypatch.setattr(comm_hooks, "IN_FLIGHT", flight)  # what another test has left in flight would be failed instead
    thread = threading.Thread(target=lambda: found.append(flight.fail("rank 1 died")))
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *args: Stuck(awaited=thread.start))
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: Stuck(awaited=thread.start))
    with pytest.raises((RuntimeError, GroupAborted), match="rank 1 died") as caught:
        backward(nn.Linear(4, 4), weight, **options)
    thread.join()
    assert (weight.failed, found) == (True, [True])
    assert is_communication_error(caught.value)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_in_flight_sums_equal_those_of_gloo(alone: None, options: dict[str, Any]) -> None:
    model, weight = nn.Linear(4, 4), ddp.GradientWeight()
    backward(model, weight, **options)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))
    assert (weight.failed, IN_FLIGHT.fail("nothing is in flight")) == (False, False)


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


def test_a_collective_of_elastics_own_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    flight = InFlight()
    monkeypatch.setattr(in_flight, "IN_FLIGHT", flight)
    thread = threading.Thread(target=flight.fail, args=("rank 1 died",))
    with pytest.raises(GroupAborted, match="rank 1 died"):
        complete(Stuck(awaited=thread.start), torch.device("cpu"))  # type: ignore[arg-type]
    thread.join()
    flight.wait()


def test_a_collective_on_a_device_is_waited_for_by_the_device() -> None:
    """A wait with a limit would block the host, and NCCL aborts its communicator after it."""
    waits = list[tuple[object, ...]]()
    complete(SimpleNamespace(wait=lambda *limit: waits.append(limit)), torch.device("cuda", 0))  # type: ignore[arg-type]
    assert waits == [()]


def test_elastics_own_collectives_can_all_be_given_up() -> None:
    """Those between all ranks: torch's own wait for one is never begun."""
    names = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter_tensor", "all_gather_into_tensor")
    blocking = [
        f"{path.name}:{call.lineno}"
        for path in sorted((SOURCE / "worker").rglob("*.py"))
        if path.name != "standalone.py"  # there nothing aborts
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names
        and isinstance(call.func.value, ast.Name) and call.func.value.id == "dist"
        and "async_op" not in [keyword.arg for keyword in call.keywords]
    ]  # fmt: skip
    assert blocking == []


class Slow:
    """A collective that ends, with `error` or without, after `slices` waits that have timed out."""

    def __init__(self, slices: int, error: str = "") -> None:
        self._slices, self._error = slices, error

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._slices:
            self._slices -= 1
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return not self._slices


@pytest.mark.parametrize("slices", [0, 1, 5])
@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_the_wait_for_a_slow_collective_ends_as_gloo_ends_it(slices: int, error: str) -> None:
    """With one slice it ends between the moment at which the wait gives up and the look whether it has ended."""
    flight, work = InFlight(), Slow(slices, error)
    flight.add(work)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed by peer") if error else contextlib.nullcontext():
        flight.finish(work)  # type: ignore[arg-type]
    assert not flight.fail("later")
    flight.wait()


def test_a_collective_that_nothing_waits_for_any_more_is_given_up_before_its_group_is_closed() -> None:
    flight, ended, stuck = InFlight(), Slow(0), Slow(10**9)
    flight.add(ended)  # type: ignore[arg-type]
    flight.add(stuck)  # type: ignore[arg-type]
    found = list[bool]()
    thread = threading.Timer(0.05, lambda: found.append(flight.fail("rank 1 died")))
    thread.start()
    flight.wait()
    thread.join()
    assert found == [True]
    assert not flight.fail("again")


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
