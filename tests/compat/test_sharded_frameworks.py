"""Sharding by a framework in a loop of one's own: after deaths all losses and weights are those of a run without."""

from __future__ import annotations

import pathlib

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code

for needed in ("accelerate", "lightning"):
    pytest.importorskip(needed)

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "sharded_frameworks.py"

pytestmark = [pytest.mark.etcd, pytest.mark.chaos, pytest.mark.timeout(300)]

KILLS = ("backward:1:12", "optimizer:0:21")
STEPS = 30


def job_of(by: str, *kills: str) -> Job:
    return Job(nodes="1", workers=2, script=SCRIPT, args={"record": "record", "by": by, "kill": ",".join(kills)})


class Ran:
    """What a job wrote down, once it was over."""

    def __init__(self, job: Job) -> None:
        lines = job.lines()
        self.finals = {line["rank"]: line["final"] for line in lines if "final" in line}
        self.steps = [line for line in lines if "loss" in line]
        self.entered = {line["generation"]: line["entered"] for line in lines if "entered" in line}
        self.setups = [line["pid"] for line in lines if "setup" in line]
        self.incidents = [incident for incident in job.incidents() if incident.kind != "late exit"]


def run(by: str, *kills: str) -> Ran:
    with job_of(by, *kills) as job:
        job.wait_phase(Phase.SUCCEEDED, 120.0)
        assert sum("killed" in line for line in job.lines()) == len(kills)
        return Ran(job)


@pytest.mark.parametrize("by", ["accelerate", "fabric"])
def test_a_loop_sharded_by_a_framework_is_bit_identical_after_deaths(by: str) -> None:
    whole, ran = run(by), run(by, *KILLS)
    curve = {(line["rank"], line["step"]): line["loss"] for line in whole.steps}
    assert len(curve) == len(whole.steps) == 2 * STEPS
    assert {(line["rank"], line["step"]): line["loss"] for line in ran.steps}.items() <= curve.items()
    assert all(line["loss"] == curve[line["rank"], line["step"]] for line in ran.steps), "a step was other at first"
    assert max(line["step"] for line in ran.steps) == STEPS
    assert ran.finals == whole.finals
    assert len(whole.finals) == 2
    assert len(set(whole.finals.values())) == 1, "each rank trained for itself"
    assert len(ran.setups) == len(set(ran.setups)) == 2 + len(KILLS), "a survivor was replaced, or made its model anew"
    for generation, rank, incident in zip((2, 3), (1, 0), ran.incidents, strict=True):
        assert (incident.detail.code, incident.ranks) == (Code.KILLED, (rank,))
        committed = max(line["step"] for line in ran.steps if line["generation"] == generation - 1)
        assert incident.step in (committed, committed + 1), "a commit may end the generation before it returns"
        assert incident.steps_lost == incident.step - ran.entered[generation]


@pytest.mark.parametrize("by", ["accelerate_fsdp1", "fabric_fsdp1"])
def test_the_first_fsdp_is_refused_by_name_before_the_first_step(by: str) -> None:
    with job_of(by) as job:
        state = eventually(lambda: job.state() if job.state().phase.over else None, 100.0, "the end") or job.state()
        assert state.phase is Phase.FAILED
        assert "FullyShardedDataParallel" in str(state.reason)
        assert "torch.distributed.fsdp.fully_shard (FSDP2)" in str(state.reason)
        assert not [line for line in job.lines() if "step" in line]
