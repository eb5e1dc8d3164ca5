"""Groups that fail before they make a step: for a reason of the network's, and for one that only sounds like it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import JobState, Phase
from elastic.contract.records.reasons import Code, codes
from elastic.contract.timeouts import Timeouts

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def ended(job: Job) -> JobState:
    state: JobState = eventually(lambda: (s := job.state()).phase.over and s, 60.0, "the end")
    assert state.phase is Phase.FAILED
    return state


NEVER_FORMS = """
import torch
import torch.distributed as dist
import elastic

def no_route(*args, **more):
    raise dist.DistNetworkError("connect to 192.0.2.1: No route to host")

def setup(job):
    dist.init_process_group = no_route
    return elastic.State(model=torch.nn.Linear(2, 2))

elastic.run(setup, lambda job, state: None)
"""


@pytest.mark.long
def test_a_group_that_can_never_form_ends_the_job_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NEVER_FORMS)
    with Job(nodes="1:1", script=script, spec={"restarts": {"budget": 3, "backoff_s": 0.4}}) as job:
        eventually(
            lambda: any(Code.PAUSES in codes(s.reason) for s in job.statuses().values()), 40.0, "the reason in status"
        )
        state = ended(job)
        assert Code.OVER_BUDGET in codes(state.reason)
        assert "No route to host" in str(state.reason)
        assert state.restarts == 4
        assert state.excluded_nodes == ()
        (incident,) = eventually(job.incidents, 20.0, "it stands among the incidents")
        assert (incident.kind, incident.restored_from, incident.world_size_after) == ("comm", "nothing", 0)
        assert "No route to host" in incident.text


def test_an_error_that_sounds_like_the_networks_is_the_scripts_own() -> None:
    with Job(nodes="1:1", args={"steps": 100, "step-ms": 1, "fail": "1:12:refused"}) as job:
        state = ended(job)
        assert Code.CRASH_LOOP in codes(state.reason)
        assert "feature store: Connection refused" in str(state.reason)
        assert state.error is not None
        assert state.error.step == 12


@pytest.mark.long
def test_sums_that_gloo_keeps_cost_no_process() -> None:
    """Gloo's threads wait for the group's timeout then, and no survivor waits with them: see `worker.in_flight`."""
    script = Path(__file__).parents[1] / "support" / "train_stuck_gloo.py"
    args = {"steps": 100_000, "batch": 64, "step-ms": 2}
    with Job(script=script, args=args, spec={"restarts": {"budget": 100}}, timeouts=Timeouts(abort_s=30.0)) as job:
        for kills in range(1, 4):
            job.wait_step(job.steps() + 20)
            job.kill_rank(kills % 4)
            eventually(lambda kills=kills: len(job.incidents()) >= kills, 25.0, f"recovery {kills}")
        assert [i.steps_lost for i in job.incidents()] == [0] * 3
        assert {cause.kind for i in job.incidents() for cause in i.causes} == {"exit"}, "no survivor was replaced"
