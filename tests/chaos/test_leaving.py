"""Told to go: a drain that has a deadline, a machine that is taken back with notice. No step is lost by either."""

from __future__ import annotations

import signal

import pytest
from chaos.harness import Cluster
from chaos.test_people import until
from support.procs import kill
from support.wait import eventually

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.mark.long
def test_a_drain_that_would_cost_all_waits_until_its_deadline() -> None:
    """Nobody else has the state and there is no checkpoint: people are told why it stays, until their time is up."""
    with Cluster(nodes=1, slots=1) as cluster:
        job = cluster.submit(steps=100_000)
        job.wait_step(10)
        (node,) = cluster.nodes
        cluster.api("POST", "/v1/nodes/node0/drain", {"reason": "a new disk", "deadline_s": 8.0})
        said = "it says why it is still there"
        eventually(lambda: "no checkpoint.dir" in job.row()["agent"]["reason"], 6.0, said)
        there = job.history.step()
        job.wait_step(there + 2, 5.0)
        assert node.daemon is not None
        eventually(lambda: node.pids() == [node.daemon.pid], 20.0, "nothing is left there")  # type: ignore[union-attr]
        eventually(lambda: "draining" in job.row()["waiting_for"], 10.0, "status says for what")
        outage = eventually(job.open_incident, 10.0, "it is on record")
        assert (outage["kind"], outage["node"], outage["ended_wall_s"]) == ("drain", "node0", None), outage


@pytest.mark.long
def test_sigterm_with_notice_leaves_at_the_boundary() -> None:
    """What a machine that is taken back does to its processes. The agent goes; the job takes no step twice."""
    with Cluster(nodes=3, slots=1) as cluster:
        job = cluster.submit(nodes="1:3", steps=100_000, pace_s=0.03, stop_grace_s=20.0)
        job.wait_step(20)
        node, workers = cluster.nodes[2], set(job.workers().values())
        assert node.stop_daemon() == 0
        kill(node.agent_pid(), signal.SIGTERM)
        until(job, world_size=2)
        eventually(lambda: not node.pids(), 20.0, "nothing is left there")
        assert set(job.workers().values()) < workers
        node.start()  # it was given back to us
        until(job, world_size=3)
        job.stop()
        job.check(Injection("planned"), Injection("planned"), lost=0)
        assert [i["steps_lost"] for i in job.incidents()] == [0, 0]
