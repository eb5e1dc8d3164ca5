"""A `train` that ends torch's process group, as scripts for torchrun do last."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.agents import Job
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from support.wait import eventually

from elastic.contract.records import Phase
from elastic.worker.comm.group import Group
from elastic.worker.comm.kept_group import kept_group


def ended(rank: int, world_size: int, port: int) -> list[Any]:
    group = Group(backend="gloo", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port,
                  generation=1)  # fmt: skip
    group.form()
    real = dist.destroy_process_group
    with kept_group():
        own = dist.new_group([0, 1])
        dist.destroy_process_group(own)
        dist.destroy_process_group()
        summed = torch.ones(1)
        dist.all_reduce(summed)
    restored = dist.destroy_process_group is real
    dist.barrier()
    try:
        with kept_group():
            real()
        said = ""
    except RuntimeError as error:
        said = str(error)
    group.close()
    return [summed.item(), restored, said]


@pytest.mark.slow
def test_the_jobs_group_is_kept_and_one_that_is_gone_nevertheless_is_named() -> None:
    for summed, restored, said in run_ranks(ended, world_size=2):
        assert (summed, restored) == (2.0, True)
        assert "leave out destroy_process_group()" in said


def test_a_group_that_the_script_has_formed_before_is_refused_with_the_way_out() -> None:
    group = Group(backend="gloo", rank=0, world_size=1, store_host="127.0.0.1", store_port=1, generation=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"leave out init_process_group\(\)"):
            group.form()
    finally:
        dist.destroy_process_group()


SCRIPT = """
import elastic, torch
import torch.distributed as dist

def setup(job):
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def train(job, state):
    while state.step < 5:
        job.commit(state)
    dist.destroy_process_group()

elastic.run(setup, train)
"""


@pytest.mark.etcd
def test_a_train_that_ends_the_group_last_is_complete(tmp_path: pathlib.Path) -> None:
    """The job formed again for ever, and blamed the network."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Job(nodes="1", workers=2, script=script) as job:
        over = eventually(lambda: job.state().phase.over and job.state(), 60.0, "the job is over", every_s=0.2)
        assert over.phase is Phase.SUCCEEDED, over.reason
        assert not job.incidents()
