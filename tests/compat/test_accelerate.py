"""Accelerate's loop under real agents: workers die at every place of it, and the result is that of a run without."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from support.agents import Job
from support.wait import eventually
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.contract.records.job_records import Phase
from elastic.integrations.accelerate import Accelerator
from elastic.worker.link.misuse import MisuseValueError

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "accelerate_loop.py"

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

KILLS = ("forward:1:4", "backward:0:7", "evaluation:1:11", "optimizer:0:17", "evaluation:0:22", "backward:1:27")


def run(*, workers: int = 2, kills: tuple[str, ...] = (), **args: Any) -> dict[str, Any]:
    given = {"record": "record", "kill": ",".join(kills), **args}
    with Job(nodes="1", workers=workers, script=SCRIPT, args=given) as job:
        over = eventually(lambda: job.state().phase.over and job.state(), 150.0, "the job is over", every_s=0.2)
        assert over.phase is Phase.SUCCEEDED, over.reason
        eventually(lambda: sum("final" in line for line in job.lines()) == workers, 30.0, "what follows run() is done")
        lines = job.lines()
        log = [json.loads(line) for line in (job.folder / "n0" / "agent.log").read_text().splitlines()]
        return {
            "finals": {line["rank"]: line for line in lines if "final" in line},
            "killed": sorted(f"{line['killed']}:{line['rank']}:{line['step']}" for line in lines if "killed" in line),
            "pids": {line["pid"] for line in lines if "world_size" in line},
            "scores": {line["epoch"]: (line["hits"], line["total"]) for line in lines if "hits" in line},
            "incidents": [(i.steps_lost, i.restored_from) for i in job.incidents() if i.kind != "late exit"],
            "ended": [e for e in log if e["event"] in ("worker.kill", "worker.failed", "zygote.unfit")],
        }


@pytest.mark.timeout(400)
def test_a_loop_survives_a_death_at_every_place() -> None:
    whole, ran = run(), run(kills=KILLS)
    assert ran["killed"] == sorted(KILLS)
    assert ran["incidents"] == [(0, "live")] * len(KILLS)
    assert not ran["ended"]
    assert len(ran["pids"]) == 2 + len(KILLS)  # one more process for each that died: no survivor was replaced
    assert whole["scores"].keys() == {0, 1, 2}
    assert whole["scores"][2][0] > 50
    assert ran["scores"] == whole["scores"]  # an evaluation that was interrupted is done again
    for rank in (0, 1):
        for key in ("final", "at", "rate"):
            assert ran["finals"][rank][key] == whole["finals"][rank][key]


@pytest.mark.timeout(400)
def test_a_step_is_the_same_in_any_world() -> None:
    """500 samples in steps of 48: no world divides the last of an epoch."""
    ran = {workers: run(workers=workers, dropout=0.0, epochs=2)["finals"][0] for workers in (1, 2, 3)}
    assert {final["at"] for final in ran.values()} == {22}
    assert {tuple(final["rate"]) for final in ran.values()} == {tuple(ran[1]["rate"])}
    assert ran[2]["norm"] == pytest.approx(ran[1]["norm"], rel=1e-6)
    assert ran[3]["norm"] == pytest.approx(ran[1]["norm"], rel=1e-6)


def setup(job: Any) -> elastic.State:
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_sharding_by_elastics_accelerator_is_refused_with_the_way_out() -> None:
    def train(job: Any, state: Any) -> None:
        Accelerator(job, state, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))

    with pytest.raises(MisuseValueError, match=r"^fsdp_plugin: .* make Accelerate's own in setup.*sharded=True"):
        elastic.run(setup, train)


def test_loop_that_is_left_within_a_step_is_refused_when_it_is_entered_again() -> None:
    """Accelerate would count its first batch as the second one of that step, and apply it twice."""
    steps = []

    def train(job: Any, state: Any) -> None:
        accelerator = Accelerator(job, state, gradient_accumulation_steps=2, cpu=True)
        loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(state.model, state.optimizer, loader)
        for batches in (4, 1, 2):
            for number, (x,) in enumerate(loader, 1):
                with accelerator.accumulate(model):
                    loss = model(x).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.commit(loss)
                steps.append(state.step)
                if number == batches:
                    break

    with pytest.raises(RuntimeError, match=r"left within step 2.*accelerator.sync_gradients"):
        elastic.run(setup, train)
    assert steps == [0, 1, 1, 2, 2], "nothing of step 2 was applied"


@pytest.mark.parametrize("leaves_both", [True, False])
def test_an_epoch_that_was_left_early_is_not_taken_for_the_end_of_all(leaves_both: bool) -> None:
    """The epochs that followed had no batches, and training ended early unseen."""
    steps = []

    def train(job: Any, state: Any) -> None:
        accelerator = Accelerator(job, state, cpu=True)
        loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(state.model, state.optimizer, loader)
        for _epoch in accelerator.epochs(3):
            for number, (x,) in enumerate(loader, 1):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                accelerator.commit()
                steps.append(state.step)
                if number == 3:
                    break
            if leaves_both:
                break

    if leaves_both:
        elastic.run(setup, train)
    else:
        with pytest.raises(RuntimeError, match=r"epoch 0 was left at step 3 of 8.*leave both loops"):
            elastic.run(setup, train)
    assert steps == [1, 2, 3]


def test_a_frozen_teacher_is_prepared_and_the_end_of_training_leaves_the_group() -> None:
    """As with Accelerate's own: DDP refuses a module without a gradient, and `end_training` ends torch's group."""

    def train(job: Any, state: Any) -> None:
        accelerator = Accelerator(job, state, cpu=True)
        teacher = torch.nn.Linear(1, 1).requires_grad_(False)
        loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=4)
        model, teacher, optimizer, loader = accelerator.prepare(state.model, teacher, state.optimizer, loader)
        assert isinstance(model, DistributedDataParallel)
        assert not isinstance(teacher, DistributedDataParallel)
        for (x,) in loader:
            accelerator.backward((model(x) - teacher(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.commit()
        accelerator.end_training()
        assert dist.is_initialized()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert elastic.run(setup, train).step == 4
    finally:
        dist.destroy_process_group()
