"""Nothing is left of a job's state: with a checkpoint once, that is an error; without, it is said loudly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, codes

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def test_an_emptied_checkpoint_folder_is_no_beginning(tmp_path: Path) -> None:
    """All agents with all they hold die, and the folder is empty afterwards, as when a mount is missing."""
    folder = tmp_path / "checkpoints"
    spec = {"checkpoint": {"dir": str(folder), "every_steps": 20}, "restarts": {"backoff_s": 0.1, "budget": 4}}
    with Job(nodes="1:1", workers=1, args={"steps": 100_000, "step-ms": 10}, spec=spec) as job:
        eventually(lambda: (p := job.progress()) and (p.checkpoint_step or 0) >= 20, 40.0, "a checkpoint")
        job.kill_node("n0")
        shutil.rmtree(folder)
        folder.mkdir()
        job.start_agent("n0")
        state = eventually(lambda: (s := job.state()).phase.over and s, 60.0, "the end")
        assert state.phase is Phase.FAILED
        assert Code.OVER_BUDGET in codes(state.reason), (
            "it may have come late, so it was looked for as long as that allows"
        )
        assert "has had a checkpoint of step" in str(state.reason)
        assert state.error is not None
        assert "has had a checkpoint of step" in state.error.message
        entered = [line for line in job.lines() if "entered" in line]
        assert {line["generation"] for line in entered} == {1}


def test_without_any_checkpoint_the_new_beginning_is_said() -> None:
    with Job(nodes="1:1", workers=1, args={"steps": 100_000, "step-ms": 10}) as job:
        eventually(lambda: (p := job.progress()) and p.step >= 20, 40.0, "progress")
        job.kill_node("n0")
        job.start_agent("n0")
        lost = Code.STATE_LOST
        eventually(lambda: any(lost in codes(s.reason) for s in job.statuses().values()), 40.0, "said in status")
        incident = eventually(
            lambda: [i for i in job.incidents() if "no checkpoint was ever saved" in i.text], 20.0, "an incident"
        )[0]
        assert incident.restored_from == "setup"
        assert incident.steps_lost is not None
        assert incident.steps_lost >= 20
        assert '"event": "state.lost"' in job.story(200)
