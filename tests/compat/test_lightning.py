"""A Lightning Trainer under real agents: workers die at every place of its loop, and the result is that of a run
without."""

from __future__ import annotations

import pathlib
from typing import Any

import lightning
import pytest
import torch
from support.agents import Job
from support.wait import eventually
from torch.distributed.fsdp import fully_shard

from elastic.contract.records.job_records import Phase
from elastic.integrations.lightning import ElasticStrategy
from elastic.worker.link.misuse import MisuseError

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "lightning_trainer.py"

pytestmark = [pytest.mark.etcd, pytest.mark.chaos, pytest.mark.timeout(600)]

PLACES = (
    "forward:1:3",
    "backward:0:5",
    "optimizer:1:8",
    "validation:0:12",
    "save:0:15",
    "forward:0:17",
    "backward:1:22",
)
"""place:rank:step. Twelve steps an epoch: validation follows steps 12 and 24; a file is saved each fifth step."""


class Ran:
    """What a job wrote down, once it was over."""

    def __init__(self, job: Job) -> None:
        lines = job.lines()
        self.finals = {line["rank"]: line for line in lines if "final" in line}
        self.killed = [(line["killed"], line["rank"], line["step"]) for line in lines if "killed" in line]
        self.pids = {line["pid"] for line in lines if "sum" in line}
        self.incidents = [i for i in job.incidents() if i.kind != "late exit"]
        self.batches = {(line["rank"], line["batch"]): line["sum"] for line in lines if "sum" in line}
        self.labels = {(line["rank"], line["batch"]): line["labels"] for line in lines if "sum" in line}


def run(*, kills: tuple[str, ...] = (), **args: object) -> Ran:
    given = {"record": "record", "kill": ",".join(kills), **args}
    with Job(nodes="1", workers=2, script=SCRIPT, args=given) as job:
        job.wait_phase(Phase.SUCCEEDED, 280.0)
        eventually(lambda: len(Ran(job).finals) == 2, 60.0, "the rest of both scripts has run")
        return Ran(job)


def check_recovered(ran: Ran, whole: Ran, kills: tuple[str, ...]) -> None:
    """Every kill was done, lost no step and no survivor, and the result is that of the undisturbed run."""
    assert sorted(ran.killed) == sorted((p, int(r), int(s)) for p, r, s in (k.split(":") for k in kills))
    assert [(i.steps_lost, i.restored_from) for i in ran.incidents] == [(0, "live")] * len(kills), ran.incidents
    assert len(ran.pids) <= 2 + len(kills), "no survivor was replaced"
    assert ran.finals.keys() == whole.finals.keys() == {0, 1}
    assert ran.batches.items() <= whole.batches.items(), "each rank has trained each batch with the same samples"
    # A rank that died after its optimizer's step wrote nothing of that batch; the others had committed it.
    assert len(whole.batches) - len(ran.batches) <= len(kills)
    for rank, final in whole.finals.items():
        assert {k: v for k, v in ran.finals[rank].items() if k != "pid"} == {
            k: v for k, v in final.items() if k != "pid"
        }


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("automatic", PLACES),
        ("manual", ("forward:1:6", "backward:0:16", "validation:1:24")),
        ("monitored", ("forward:1:5", "save:0:10", "backward:0:15")),
        ("plateau", ("validation:1:12", "save:1:20", "forward:0:24", "validation:0:36")),
    ],
)
def test_trainer_survives_a_death_at_every_place_of_its_loop(kind: str, kills: tuple[str, ...]) -> None:
    epochs = 3 if kind == "plateau" else 2
    whole, ran = run(kind=kind, epochs=epochs), run(kind=kind, epochs=epochs, kills=kills)
    check_recovered(ran, whole, kills)


def test_each_sample_of_another_sampler_is_taken_once_in_an_epoch_and_by_the_same_rank_after_a_death() -> None:
    """Ranks draw different random numbers, and the sampler draws its order."""
    whole, kills = run(kind="subset", epochs=3), ("forward:1:3", "backward:0:17", "optimizer:1:30")
    for epoch in range(3):
        taken = [label for (_, batch), labels in whole.labels.items() if batch // 12 == epoch for label in labels]
        assert len(taken) == len(set(taken)) == 96, f"epoch {epoch}: {len(set(taken))} of 96 samples"
    check_recovered(run(kind="subset", epochs=3, kills=kills), whole, kills)


def test_trainer_that_accumulates_gradients_repeats_the_step_it_was_in() -> None:
    whole, ran = run(accumulate=4), run(accumulate=4, kills=("backward:1:2", "forward:0:4"))
    check_recovered(ran, whole, ("backward:1:2", "forward:0:4"))


def test_loop_with_fabric_survives_deaths() -> None:
    kills = ("backward:1:6", "optimizer:0:11")
    finals = []
    for wanted in ((), kills):
        with Job(nodes="1", workers=2, script=SCRIPT.with_name("fabric_loop.py"),
                 args={"record": "record", "kill": ",".join(wanted)}) as job:  # fmt: skip
            job.wait_phase(Phase.SUCCEEDED, 200.0)
            lines = job.lines()
            assert len([line for line in lines if "killed" in line]) == len(wanted)
            assert [i.steps_lost for i in job.incidents() if i.kind != "late exit"] == [0] * len(wanted)
            assert len({line["pid"] for line in lines}) == 2 + len(wanted), "no survivor was replaced"
            finals.append({(line["final"], line["at"], line["of"]) for line in lines if "final" in line})
    assert finals[0] == finals[1]
    assert len(finals[0]) == 1


class Sharded(lightning.LightningModule):
    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name

    def configure_model(self) -> None:
        self.inner = torch.nn.Linear(2, 1)
        fully_shard(self.inner, mesh=self.device_mesh["data_parallel"] if self.by_name else self.device_mesh)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, index: int) -> Any:
        raise AssertionError("a step was made")


@pytest.mark.parametrize(
    ("by_name", "said"),
    [(True, r"device_mesh: ElasticStrategy does not shard.*Fabric's"), (False, r"sharded=True.*leave out fully_shard")],
)
def test_a_module_that_shards_itself_is_refused_before_the_first_step(by_name: bool, said: str) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=ElasticStrategy(), max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(MisuseError, match=said):
        trainer.fit(Sharded(by_name=by_name), torch.utils.data.DataLoader([torch.ones(2)] * 4))
