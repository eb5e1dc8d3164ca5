"""Groups that fail before they make a step: for a reason of the network's, and for one that only sounds like it."""

from __future__ import annotations

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.core.records import JobState, Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def ended(job: Job) -> JobState:
    state: JobState = eventually(lambda: (s := job.state()).phase.over and s, 60.0, "the end")
    assert state.phase is Phase.FAILED
    return state


@pytest.mark.long
def test_a_group_that_can_never_form_ends_the_job_and_says_why() -> None:
    spec = {"env": {"GLOO_SOCKET_IFNAME": "nowhere0"}, "restarts": {"budget": 3, "backoff_s": 0.4}}
    with Job(nodes="1:1", args={"steps": 100}, spec=spec) as job:
        said = "generations in a row broke before their first step"
        eventually(lambda: any(said in s.reason for s in job.statuses().values()), 40.0, "the reason in status")
        state = ended(job)
        assert "4 failures within" in state.reason
        assert "nowhere0" in state.reason
        assert state.restarts == 4
        assert state.excluded_nodes == ()
        (incident,) = eventually(job.incidents, 20.0, "it stands among the incidents")
        assert (incident.kind, incident.restored_from, incident.world_size_after) == ("comm", "nothing", 0)
        assert "nowhere0" in incident.detail


def test_an_error_that_sounds_like_the_networks_is_the_scripts_own() -> None:
    with Job(nodes="1:1", args={"steps": 100, "step-ms": 1, "fail": "1:12:refused"}) as job:
        state = ended(job)
        assert "crash loop" in state.reason
        assert "feature store: Connection refused" in state.reason
        assert state.error is not None
        assert state.error.step == 12
