"""Process groups of the script's own, made in `train`: closed with the generation, and named alike on all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forming import both, make
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.worker.comm.errors import is_communication_error
from elastic.worker.comm.group import Group
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link

CPU = torch.device("cpu")


def test_alone_there_is_no_group() -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    assert job.new_group([0]) is None


@pytest.mark.parametrize("chosen", [[], [0, 0], [-1], [0, 2]])
def test_ranks_that_do_not_exist_are_named(chosen: list[int]) -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    job.enter(rank=0, world_size=2, generation=1, checkpoint_scheduler=None)
    with pytest.raises(ValueError, match=r"job\.new_group\(\[.*distinct ranks of 0 to 1"):
        job.new_group(chosen)


def test_in_setup_it_is_refused() -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    with pytest.raises(RuntimeError, match=r"job\.new_group belongs in train"):
        job.new_group()


def entered(forming: str, rank: int, world_size: int, port: int, generation: int) -> tuple[Group, Job]:
    group = make(forming, rank, world_size, port, generation)
    group.form()
    job = Job(name="j", device=CPU, local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=generation, checkpoint_scheduler=None, group_s=77.0)
    return group, job


def neighbours(job: Job) -> dict[str, Any]:
    """One group per pair of neighbours, each used once; those of this rank by name."""
    made = [job.new_group([rank, rank + 1]) for rank in range(job.world_size - 1)]
    mine = {g.group_name: g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER}
    for group in mine.values():
        dist.all_reduce(torch.ones(1), group=group)
    return mine


def loses_one(rank: int, world_size: int, port: int, forming: str) -> Any:
    group, job = entered(forming, rank, world_size, port, 1)
    mine = neighbours(job)
    names = list(mine)
    dist.barrier()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(1.0, group.abort, ["a rank died"]).start()
    begun_s = time.monotonic()
    try:
        # Rank 1 waits for the dead rank, and rank 0 for rank 1: no connection of rank 0's breaks by itself.
        for own in reversed(list(mine.values())):
            dist.all_reduce(torch.ones(4), group=own)
    except RuntimeError as error:
        lost = is_communication_error(error)
    else:
        lost = False
    freed_s = time.monotonic() - begun_s
    group.abort("a rank died")
    mine.clear()
    group.close()
    group, job = entered(forming, rank, world_size - 1, port, 2)
    again = list(neighbours(job))
    group.close()
    return {"lost": lost, "freed_s": freed_s, "names": names, "again": again}


@pytest.mark.slow
@both
def test_an_abort_reaches_the_scripts_groups_and_the_next_are_named_alike(forming: str) -> None:
    *survivors, dead = run_ranks(loses_one, world_size=3, forming=forming)
    assert dead == {"died": signal.SIGKILL}
    assert [s["lost"] for s in survivors] == [True, True]
    assert max(s["freed_s"] for s in survivors) < 20.0
    first, second = survivors
    assert first["names"] == second["names"][:1], "both have the group of ranks 0 and 1"
    assert first["again"] == second["again"] == first["names"]


def time_outs(rank: int, world_size: int, port: int, forming: str) -> Any:
    group, job = entered(forming, rank, world_size, port, 1)
    own = job.new_group([1, 0])
    limit_s = own._get_backend(CPU).options._timeout.total_seconds()
    ordered = dist.get_process_group_ranks(own)
    group.close()
    return [limit_s, ordered]


@pytest.mark.slow
@both
def test_a_group_has_the_time_out_of_the_jobs_group(forming: str) -> None:
    """torch's default is 30 minutes, and a `job.quiet` may last longer."""
    assert run_ranks(time_outs, world_size=2, forming=forming) == [[77.0, [0, 1]]] * 2
