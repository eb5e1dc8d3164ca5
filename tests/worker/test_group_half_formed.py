"""A forming that failed half-way leaves nothing behind that keeps the next one from succeeding."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forming import both, make
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.worker.comm.errors import GroupAborted

pytestmark = pytest.mark.slow


LIMITS = {"timeout_s": 30.0, "form_timeout_s": 20.0}


def half_formed_then_whole(rank: int, world_size: int, port: int, forming: str) -> Any:
    """In the first round the last rank arrives and never forms, as if it had died there; in the second it is new."""
    group = make(forming, rank, world_size, port, 1, **LIMITS)
    if rank == world_size - 1:
        group._arrive(lambda: False)
    else:
        inside, real = threading.Event(), dist.init_process_group

        def init(*args: Any, **given: Any) -> None:
            inside.set()
            real(*args, **given)

        dist.init_process_group = init
        threading.Thread(target=lambda: inside.wait(20.0) and (time.sleep(0.3), group.abort("a rank died"))).start()
        with pytest.raises(GroupAborted):
            group.form()
        dist.init_process_group = real
    group.close()
    group = make(forming, rank, world_size, port, 2, **LIMITS)
    group.form()
    ones = torch.ones(4)
    dist.all_reduce(ones)
    group.close()
    return ones.tolist()


@both
def test_ranks_of_a_failed_forming_form_a_group_with_new_ranks(forming: str) -> None:
    assert run_ranks(half_formed_then_whole, world_size=3, forming=forming) == [[3.0] * 4] * 3
