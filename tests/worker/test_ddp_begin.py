"""job.ddp at the job's beginning: all ranks have the same parameters, or the job ends with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.comm.group import Group
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
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
    job = Job(name="job", device=torch.device("cpu"), local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None, state=state)
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
    assert all("the parameters differ between the ranks (no majority" in each for each in said), said
    assert all("in setup()" in each for each in said), said
    said = run_ranks(wrapped, world_size=3, alone=True, steps=0)
    assert all("between the ranks (0 from the majority)" in each for each in said), said


@pytest.mark.parametrize("steps", [0, 1])
def test_equal_parameters_are_wrapped(steps: int) -> None:
    assert run_ranks(wrapped, world_size=2, alone=False, steps=steps) == ["wrapped"] * 2


def in_groups(rank: int, world_size: int, port: int) -> Any:
    """(what job.ddp says of a group of two of the three ranks, the gradient with one of all ranks)"""
    torch.manual_seed(0)
    state = State(model=nn.Linear(1, 1, bias=False))
    made = Group(
        backend="gloo", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port, generation=1
    )
    made.form()
    job = Job(name="job", device=torch.device("cpu"), local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None, state=state)
    pair, everyone = job.new_group([0, 1]), job.new_group()
    said = ""
    if rank < 2:
        try:
            job.ddp(state.model, process_group=pair)
        except ValueError as error:
            said = str(error)
    job.ddp(state.model, process_group=everyone)(torch.full((1, 1), float(rank))).sum().backward()
    gradient = state.model.weight.grad.item()
    job.forget()
    made.close()
    return [said, gradient]


def test_a_group_of_some_ranks_is_refused_before_anything_is_exchanged() -> None:
    """At step 0 two ranks waited for the third one. Later their weights added up to less than 1."""
    results = run_ranks(in_groups, world_size=3)
    assert ["process_group of 2 of the 3 ranks" in said for said, _ in results] == [True, True, False]
    assert [gradient for _, gradient in results] == [pytest.approx(1.0)] * 3
