"""Groups that torch forms again in place: what that adds to the contract of `Group` (`test_group_ranks.py`), and where
it is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forming import make, needs_reconfigure
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.contract.job.spec import InvalidSpec, parse_job
from elastic.contract.worker.worker_config import WorkerConfig
from elastic.worker.comm import reconfigured
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.comm.group import Group
from elastic.worker.comm.in_flight import IN_FLIGHT
from elastic.worker.comm.reconfigured import ReconfiguredGroup, group_kind
from elastic.worker.torch_internals import torch_private

LIMITS = {"timeout_s": 30.0, "form_timeout_s": 20.0}


def formed(rank: int, world_size: int, port: int, generation: int, **options: float) -> Group:
    group = make("reconfigure", rank, world_size, port, generation, **(LIMITS | options))
    group.form()
    return group


def gathered(rank: int) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([rank]))
    return [int(value) for value in found]


def membership(rank: int) -> dict[str, Any]:
    """As torch sees it in every place."""
    sent = torch.tensor([float(rank)])
    dist.broadcast(sent, 0)
    own = dist.new_group()
    dist.all_reduce(torch.ones(1), group=own)
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "ranks": dist.get_process_group_ranks(dist.group.WORLD),
        "sub-group": dist.get_process_group_ranks(own),
        "gathered": gathered(rank),
        "from 0": float(sent),
    }


def replaced(rank: int, world_size: int, port: int) -> Any:
    """The last rank is a newcomer in generation 2, where it gets rank 0; rank 2 is killed before."""
    newcomer, dies = world_size - 1, world_size - 2
    same = None
    if rank != newcomer:
        group = formed(rank, world_size - 1, port, 1)
        before = dist.group.WORLD
        for _ in range(57):  # more collectives than the newcomer has seen
            dist.all_reduce(torch.ones(8))
        if rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            dist.recv(torch.ones(8), dies)
        group.abort("a rank died")
        group.close()
        assert not dist.is_initialized()
    place = 0 if rank == newcomer else rank + 1
    group = formed(place, world_size - 1, port, 2)
    found = membership(place)
    if rank != newcomer:
        same = dist.group.WORLD is before
    group.close()
    # And on, with fewer: the newcomer leaves.
    if rank != newcomer:
        group = formed(rank, world_size - 2, port, 3)
        found["then"] = [dist.get_rank(), dist.get_world_size(), gathered(rank), dist.group.WORLD is before]
        group.close()
    return found | {"same": same}


@pytest.mark.slow
@needs_reconfigure
def test_survivors_keep_the_group_object_and_meet_a_newcomer_in_it() -> None:
    first, second, dead, newcomer = run_ranks(replaced, world_size=4)
    assert dead == {"died": signal.SIGKILL}
    for found, rank in ((newcomer, 0), (first, 1), (second, 2)):
        everyone = {"rank": rank, "size": 3, "ranks": [0, 1, 2], "sub-group": [0, 1, 2], "gathered": [0, 1, 2]}
        assert {name: found[name] for name in everyone} == everyone
        assert found["from 0"] == 0.0
    assert [first["same"], second["same"], newcomer["same"]] == [True, True, None]
    assert first["then"] == [0, 2, [0, 1], True]
    assert second["then"] == [1, 2, [0, 1], True]


def silent_after_its_handle(rank: int, world_size: int, port: int) -> Any:
    """In generation 2 the last rank says where it is and does not connect; in generation 3 all do."""
    group = formed(rank, world_size, port, 1)
    gathered(rank)  # no rank closes its connections while another still connects
    group.close()
    first = reconfigured._kept
    group = make("reconfigure", rank, world_size, port, 2, **LIMITS)
    real, at_s = torch_private.reconfigure, list[float]()

    def silent(*_: Any) -> None:
        assert group._store is not None
        dist.PrefixStore("g3", group._store.underlying_store).wait(["arrived"])  # until the others are free
        raise GroupAborted("is not to connect")

    def cut_later(*args: Any) -> None:
        threading.Timer(0.3, lambda: (at_s.append(time.monotonic()), group.abort("a rank died"))).start()
        real(*args)

    torch_private.reconfigure = silent if rank == world_size - 1 else cut_later
    with pytest.raises(GroupAborted):
        group.form()
    freed_s = time.monotonic() - at_s[0] if at_s else 0.0
    torch_private.reconfigure = real
    group.close()
    assert reconfigured._kept is None, "an object that was formed half-way is not used again"
    group = formed(rank, world_size, port, 3)
    found = {"freed_s": freed_s, "gathered": gathered(rank), "other": reconfigured._kept is not first}
    group.close()
    return found


@pytest.mark.slow
@needs_reconfigure
def test_a_rank_that_does_not_connect_is_let_go_of_and_met_again() -> None:
    for found in run_ranks(silent_after_its_handle, world_size=3):
        assert found["gathered"] == [0, 1, 2]
        assert found["other"]
        assert found["freed_s"] < 1.5


def times_out(rank: int, world_size: int, port: int) -> Any:
    """The time-out of collectives is the group's, also after a forming with another limit."""
    for generation in (1, 2):
        group = formed(rank, world_size, port, generation, timeout_s=1.0)
        gathered(rank)
        if generation == 1:
            group.close()
    begun_s = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.recv(torch.ones(1), 1)
    else:
        with pytest.raises(RuntimeError):  # rank 0 has given up
            dist.recv(torch.ones(1), 0)
    took_s = time.monotonic() - begun_s
    group.abort("time-out")
    group.close()
    changed = formed(rank, world_size, port, 3, timeout_s=77.0)
    gathered(rank)
    limit_s = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    changed.close()
    return [took_s, limit_s]


@pytest.mark.slow
@needs_reconfigure
def test_collectives_have_the_time_out_of_their_group() -> None:
    for took_s, limit_s in run_ranks(times_out, world_size=2):
        assert took_s < LIMITS["form_timeout_s"] / 2
        assert limit_s == 77.0


class Exchanging(torch.nn.Module):
    """A collective in its forward, as in a script's own tensor parallelism."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y.sin()


def compiles(rank: int, world_size: int, port: int) -> Any:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(generation)
        return graph.forward

    module = torch.compile(Exchanging(), backend=backend)
    for generation in (1, 2, 3):
        group = formed(rank, world_size, port, generation)
        with torch.no_grad():
            assert torch.equal(module(torch.ones(4)), torch.full((4,), float(world_size)).sin())
        gathered(rank)
        group.close()
    return compiled


@pytest.mark.slow
@needs_reconfigure
def test_a_graph_with_a_collective_is_not_compiled_again() -> None:
    """With a new group it is, in each generation: the graph is guarded by the group object."""
    assert run_ranks(compiles, world_size=2) == [[1], [1]]


def left_in_flight(rank: int, world_size: int, port: int) -> Any:
    """A sum of gradients of the first generation is never reported, as by gloo where it keeps a send."""
    group = formed(rank, world_size, port, 1)
    gathered(rank)
    before = dist.group.WORLD
    IN_FLIGHT.follow(torch.futures.Future(), lambda done: torch.ones(1), lambda: None)
    group.abort("a rank died")
    group.close()
    assert reconfigured._kept is None
    group = formed(rank, world_size, port, 2)
    found = [gathered(rank), dist.group.WORLD is before]
    group.close()
    return found


@pytest.mark.slow
@needs_reconfigure
def test_an_object_with_a_collective_that_does_not_end_is_not_used_again() -> None:
    assert run_ranks(left_in_flight, world_size=2) == [[[0, 1], False]] * 2


def test_new_groups_are_the_default() -> None:
    assert group_kind(WorkerConfig().forming, "gloo") is group_kind(WorkerConfig().forming, "nccl") is Group


def test_it_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "RECONFIGURABLE", False)
    with pytest.raises(RuntimeError, match=r"forming = 'reconfigure' needs torch 2\.14 or newer, and this is"):
        group_kind("reconfigure", "gloo")


def test_it_is_refused_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with backend 'auto' learns it from its workers, any other when it is submitted."""
    monkeypatch.setattr(torch_private, "RECONFIGURABLE", True)
    assert group_kind("reconfigure", "gloo") is ReconfiguredGroup
    with pytest.raises(RuntimeError, match="needs backend = 'gloo', and this job's is nccl"):
        group_kind("reconfigure", "nccl")
    job = {"name": "j", "script": "train.py", "forming": "reconfigure"}
    assert parse_job(job).forming == "reconfigure"
    with pytest.raises(InvalidSpec, match="forming = 'reconfigure': needs backend 'gloo'"):
        parse_job(job | {"backend": "nccl"})
