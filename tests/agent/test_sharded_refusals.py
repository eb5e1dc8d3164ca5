"""What a sharded job refuses, or survives only in part: each by name, and with the cure, as the job's reason has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import JobState, Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = Path(__file__).parents[1] / "support" / "train_sharded_loops.py"
LONG = pytest.mark.long


def job_of(of: str, *, die: str = "", steps: int = 12, **spec: Any) -> Job:
    job = Job(script=SCRIPT, spec=spec)
    given = ("--record", job.record, "--steps", steps, "--of", of, "--die", die)
    spec = {name: getattr(job.spec, name) for name in job.spec.__struct_fields__}
    job.spec = type(job.spec)(**{**spec, "args": tuple(map(str, given))})
    return job


def end(job: Job) -> JobState:
    return eventually(lambda: job.state() if job.state().phase.over else None, 60.0, "the end") or job.state()


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("factored", "Take an optimizer whose state has its parameters' shapes, such as AdamW"),
        ("hsdp+statistics", "average BatchNorm's statistics"),
        pytest.param("fsdp1", "torch.distributed.fsdp.fully_shard (FSDP2)", marks=LONG),
        pytest.param("eight", "8", marks=LONG),
        pytest.param("not_said", "sharded=True", marks=LONG),
    ],
)
def test_what_cannot_be_restored_ends_the_job(of: str, said: str, tmp_path: Path) -> None:
    with job_of(of, checkpoint={"dir": str(tmp_path), "every_steps": 3}) as job:
        state = end(job)
        assert state.phase is Phase.FAILED
        assert said in str(state.reason)
        assert not list(tmp_path.glob("step-*")), "a checkpoint of a state that is refused"


@LONG
def test_a_folder_of_each_node_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with job_of("fsdp", checkpoint={"dir": str(tmp_path), "every_steps": 3, "shared": False}) as job:
        state = end(job)
        assert state.phase is Phase.FAILED
        assert "checkpoint.shared = true" in str(state.reason)
        assert not job.commits()


@LONG
def test_a_replacement_that_builds_other_boxes_is_refused(tmp_path: Path) -> None:
    """Survivors call `setup` again, too, and have what they had in memory."""
    with job_of("other_boxes", die="1:6:forward", checkpoint={"dir": str(tmp_path), "every_steps": 2}) as job:
        state = end(job)
        assert state.phase is Phase.FAILED
        assert "setup() has built other boxes of the state" in str(state.reason)


@LONG
def test_a_world_that_is_too_small_for_the_mesh_ends_the_job_by_name_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"nodes": "1:2", "checkpoint": {"dir": str(tmp_path), "every_steps": 2}}
    with job_of("four", steps=500, **spec) as job:
        job.wait_step(6)
        job.kill_node("n1")
        state = end(job)
        assert state.phase is Phase.FAILED
        assert "setup() fails in a world of 2 ranks" in str(state.reason)
        assert "the minimum of `nodes`" in str(state.reason)
        assert list(tmp_path.glob("step-*"))


def shards(folder: Path, step: int) -> list[Path]:
    return sorted((folder / f"step-{step}").glob("*.safetensors"))


@LONG
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_checkpoint_without_a_box_is_passed_over_and_nothing_begins_anew_without_another(
    how: str, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {"checkpoint": {"dir": str(tmp_path), "every_steps": 4}}
    with job_of("fsdp", **spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
        finals = {path.name: path.read_text() for path in job.record.glob("final-*.txt")}
    harm(shards(tmp_path, 12)[2], how)
    with job_of("fsdp", **spec) as job:
        job.wait_phase(Phase.SUCCEEDED)
        assert {line["entered"] for line in job.lines() if "entered" in line} == {8}
        assert {path.name: path.read_text() for path in job.record.glob("final-*.txt")} == finals
    for step in (4, 8, 12):
        harm(shards(tmp_path, step)[1], how)
    with job_of("fsdp", **spec) as job:
        # It is tried again for a while: a folder may be mounted late.
        eventually(lambda: "checkpoint of step 12" in str(job.all_incidents()), 60.0, "the named error")
        assert not job.commits(), "training began anew beside checkpoints"


def harm(shard: Path, how: str) -> None:
    if how == "missing":
        shard.unlink()
    else:
        raw = bytearray(shard.read_bytes())
        raw[-5] ^= 255
        shard.write_bytes(raw)
