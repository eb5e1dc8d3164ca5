"""job.ddp at the job's beginning: all ranks have the same parameters, or the job ends with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.comm.group import Group
from elastic.worker.job import Job
from elastic.worker.standalone import NoLink
from elastic.worker.state.state import State

pytestmark = pytest.mark.slow


def wrapped(rank: int, world_size: int, port: int, alone: bool, steps: int) -> Any:
    torch.manual_seed(0)
    state = State(model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    made = Group(
        backend="gloo", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port, generation=1
    )
    made.form()
    for _ in range(steps):
        state.committed(1)
    job = Job(name="job", device=torch.device("cpu"), local_rank=rank, link=NoLink())
    job.enter(rank=rank, world_size=world_size, generation=1, keeper=None, state=state)
    if rank == 0 and alone:
        with torch.no_grad():
            state.model[1].bias.fill_(5.0)
    try:
        job.ddp(state.model)
    except RuntimeError as error:
        return str(error)
    finally:
        job.forget()
        made.close()
    return "wrapped"


def test_weights_that_one_rank_has_loaded_alone_are_refused_on_all() -> None:
    """Stock DDP sends rank 0's to all; the replicas would differ from the first step on, with equal versions."""
    said = run_ranks(wrapped, world_size=2, alone=True, steps=0)
    assert all("the parameters differ between the ranks" in each and "in setup()" in each for each in said), said


@pytest.mark.parametrize("steps", [0, 1])
def test_equal_parameters_are_wrapped(steps: int) -> None:
    assert run_ranks(wrapped, world_size=2, alone=False, steps=steps) == ["wrapped"] * 2
