"""A `train` that ends torch's process group, as scripts for torchrun do last."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import warm
from support.agents import Job
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from support.wait import eventually
from torch.distributed import init_process_group

from elastic.contract.records.job_records import Phase
from elastic.worker.comm.group import Group
from elastic.worker.comm.kept_group import kept_group


def ended(rank: int, world_size: int, port: int) -> list[Any]:
    group = formed(rank, world_size, port)
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


def forms_one(rank: int, world_size: int, port: int) -> list[str]:
    group = formed(rank, world_size, port)
    dist.barrier()  # a rank that closes its group at once cuts off one that still connects
    said = []
    for error in (None, ValueError("another")):
        try:
            with kept_group():
                if error is not None:
                    raise error
                init_process_group("gloo")  # by a name that was imported before, as in torch's tutorial
        except (RuntimeError, ValueError) as raised:
            said.append(f"{type(raised).__name__}: {raised}")
    group.close()
    return said


@pytest.mark.slow
def test_a_train_that_forms_a_group_is_told_to_leave_it_out() -> None:
    for twice, another in run_ranks(forms_one, world_size=2):
        assert "leave it out" in twice
        assert "job.new_group(…)" in twice
        assert another == "ValueError: another"


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
dist.destroy_process_group()
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


def test_standalone_a_script_may_end_the_group_after_the_run(tmp_path: pathlib.Path) -> None:
    """It ended with torch's AssertionError when all was trained."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
           "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    ended = warm.run([str(script)], env=os.environ | env)
    assert ended.returncode == 0, ended.stderr
    assert "the script calls destroy_process_group(), which is left out" in ended.stderr
