"""Pipeline stages under sharded=True: each rank's stage, values and generators are its own, and come back to it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.format.errors import SaveFailed
from elastic.checkpoint.stored.export import read_all
from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = Path(__file__).parents[1] / "support" / "train_pipeline.py"
LONG = pytest.mark.long


def job_of(of: str, die: str = "", steps: int = 16, **spec: Any) -> Job:
    job = Job(script=SCRIPT, spec=spec)
    given = ("--record", job.record, "--steps", steps, "--of", of, "--die", die)
    spec = {name: getattr(job.spec, name) for name in job.spec.__struct_fields__}
    job.spec = type(job.spec)(**{**spec, "args": tuple(map(str, given))})
    return job


def finals(job: Job) -> dict[str, str]:
    return {path.name: path.read_text() for path in job.record.glob("final-*.txt")}


@functools.cache
def undisturbed(of: str) -> dict[str, str]:
    with job_of(of) as job:
        job.wait_phase(Phase.SUCCEEDED)
        return finals(job)


@pytest.mark.parametrize(
    "of",
    ["1f1b", *(pytest.param(of, marks=LONG) for of in ("gpipe", "1f1b+sharded", "gpipe+replicas", "1f1b+replicas"))],
)
def test_a_pipeline_is_bit_identical_after_deaths_of_ranks_and_a_node(of: str, tmp_path: Path) -> None:
    deaths = "1:6:backward", "3:10:node", "2:13:optimizer"
    with job_of(of, ",".join(deaths), snapshots="off", checkpoint={"dir": str(tmp_path), "every_steps": 2}) as job:
        node = job.record / f"died.{deaths[1]}"
        eventually(lambda: node.exists() or job.state().phase.over, 60.0, "the wait before the node's death")
        job.kill_node("n1")
        job.start_agent("n1")
        job.wait_phase(Phase.SUCCEEDED)
        assert len(list(job.record.glob("died.*"))) == 3
        entered = [line["entered"] for line in job.lines() if "entered" in line and line["generation"] > 1]
        assert max(entered) > 0, "nothing was restored"
        assert finals(job) == undisturbed(of)
    with pytest.raises(SaveFailed, match="stages of a pipeline"):
        read_all(str(tmp_path / "step-16"))


@LONG
@pytest.mark.parametrize("of", ["gpipe", "1f1b+replicas"])
def test_the_memory_has_each_stage(of: str) -> None:
    with job_of(of, "1:5:forward,2:11:committed", steps=16) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert len(list(job.record.glob("died.*"))) == 2
        assert finals(job) == undisturbed(of)


def test_stages_whose_tensors_have_the_same_names_are_refused(tmp_path: Path) -> None:
    with job_of("gpipe+one_name", checkpoint={"dir": str(tmp_path), "every_steps": 1}) as job:
        state = eventually(lambda: job.state() if job.state().phase.over else None, 60.0, "the end")
        assert state.phase is Phase.FAILED
        assert "name it by its number (ModuleDict)" in str(state.reason)
        assert not list(tmp_path.glob("step-*"))


@LONG
def test_a_checkpoint_of_stages_is_refused_by_another_number_of_ranks(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"checkpoint": {"dir": str(tmp_path), "every_steps": 4}}
    with job_of("gpipe", steps=8, **spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
    with job_of("gpipe", steps=12, nodes="1", workers_per_node=2, **spec) as job:
        state = eventually(lambda: job.state() if job.state().phase.over else None, 60.0, "the end")
        assert state.phase is Phase.FAILED
        assert "Set nodes and workers_per_node as then" in str(state.reason)
