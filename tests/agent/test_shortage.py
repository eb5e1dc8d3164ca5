"""What a node lacks is no fault of the script: a job whose agent cannot start workers waits, and goes on."""

from __future__ import annotations

import resource

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, codes

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def test_agent_without_descriptors_costs_its_job_no_more_than_the_time() -> None:
    with Job(nodes="2:2", workers=1, args={"steps": 5000, "step-ms": 8}) as job:
        job.wait_step(20)
        pid = job.agents["n1"].pid
        eventually(lambda: all(row.pid for row in job.statuses()["n1"].ranks), 10.0, "its last status has the process")
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
        killed = next(row.rank for row in job.statuses()["n1"].ranks)
        job.kill_rank(killed)
        state = eventually(lambda: s if (s := job.state()).no_agent else None, 20.0, "the node is excluded")
        assert state.excluded_nodes == ("n1",)
        assert "Too many open files" in str(state.no_agent["n1"])
        eventually(lambda: job.state().phase is Phase.WAITING, 10.0, "it waits for the node")
        again = {Code.TRIED_AGAIN, Code.NOT_STARTED}
        eventually(lambda: any(again <= codes(s.reason) for s in job.statuses().values()), 10.0, "and says so")
        step = job.steps()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        job.wait_step(step + 20)
        state = eventually(lambda: s if not (s := job.state()).no_agent else None, 10.0, "it is taken back")
        assert (state.phase, state.excluded_nodes, state.restarts) == (Phase.RUNNING, (), 1)
        assert {"exit", "shortage"} >= {cause.kind for incident in job.incidents() for cause in incident.causes}
        assert [incident.steps_lost for incident in job.incidents()] == [0] * len(job.incidents())
