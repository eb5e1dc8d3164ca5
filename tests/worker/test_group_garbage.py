"""What is left of a group does no harm in the processes that a script forks."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch.distributed as dist
from support.forming import formed
from support.ranks import ranks, run_ranks
from support.wait import eventually

__all__ = ["ranks"]


def forks(rank: int, world_size: int, port: int) -> str:
    """Fork while a group is garbage, and have the child collect."""
    formed(rank, world_size, port)
    cycle: list[Any] = [dist.group.WORLD]
    cycle.append(cycle)
    gc.disable()
    del cycle
    dist.destroy_process_group()
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(7)
    try:
        status = _status(pid)
    except AssertionError:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hangs"
    return f"ends with {os.waitstatus_to_exitcode(status)}"


def _status(pid: int) -> int:
    found = [0, 0]

    def ended() -> bool:
        found[:] = os.waitpid(pid, os.WNOHANG)
        return found[0] == pid

    eventually(ended, 20.0, "the child's end")
    return found[1]


def test_a_process_that_the_script_forks_does_not_collect_a_group_of_before() -> None:
    assert run_ranks(forks, world_size=2) == ["ends with 7"] * 2
