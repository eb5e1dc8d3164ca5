"""Jobs with `forming = "reconfigure"`: recovery in the same group object, and the refusal where torch cannot do it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import Job
from support.forming import needs_reconfigure
from support.wait import eventually

from elastic.contract.records.job_records import Phase
from elastic.worker.torch_internals import torch_private

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

COUNTING = Path(__file__).parent.parent / "support" / "train_counting_groups.py"
STEPS = 90


@needs_reconfigure
def test_killed_workers_cost_no_step_and_change_no_bit_in_a_kept_group() -> None:
    """The weights are those of a run without failures in which each group is a new one."""
    with Job(nodes="1:1", args={"steps": STEPS, "step-ms": 0}) as plain:
        plain.wait_phase(Phase.SUCCEEDED)
        undisturbed = plain.weights()
    spec = {"forming": "reconfigure"}
    with Job(nodes="1:1", script=COUNTING, args={"steps": STEPS, "step-ms": 3}, spec=spec) as job:
        for count, rank in enumerate((1, 0, 0), start=1):
            job.wait_step(20 * count)
            job.kill_rank(rank)
            eventually(lambda count=count: len(job.incidents()) >= count, 20.0, f"recovery {count}")
        job.wait_phase(Phase.SUCCEEDED)
        assert [i.steps_lost for i in job.incidents()] == [0, 0, 0]
        assert all(i.restored_from == "live" for i in job.incidents())
        assert len(job.weights()) == 1
        assert job.weights() == undisturbed
        made = [path.read_text().splitlines() for path in job.record.glob("groups-*")]
        assert len(made) == 2 + 3, "two ranks, three replacements"
        assert all(len(lines) == 1 and "enable_reconfigure" in lines[0] for lines in made), made


@pytest.mark.skipif(torch_private.RECONFIGURABLE, reason="this torch can do it")
@pytest.mark.long
def test_an_older_torch_is_named_when_the_job_fails() -> None:
    spec = {"forming": "reconfigure", "restarts": {"same_failure": 1}}
    with Job(nodes="1:1", args={"steps": STEPS}, spec=spec) as job:
        state = job.wait_phase(Phase.FAILED)
        assert "needs torch 2.14 or newer" in str(state.reason)
