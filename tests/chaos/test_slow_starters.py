"""A job whose set-up takes long: which rank waits for which, and what a standby saves (G1, with its assumption)."""

from __future__ import annotations

import pytest
from chaos.harness import Cluster, Node, now_s
from support.procs import alive, kill
from support.wait import eventually, stretched

from elastic.testing import Injection, Kill

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.mark.long
def test_slow_setup_with_a_standby_recovers_as_fast_as_a_quick_one() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=520, setup_s=8.0, standby=1, pace_s=0.03)
        job.wait_step(5, 90.0)
        # the standby needs its eight seconds as well before it is of use
        job.order("kill", Kill(rank=1, step=450))
        job.wait_over(deadline_s=120.0)
        history = job.check(job.injection("kill"))
        struck_s = job.struck("kill").at_s
        back_s = history.back_s(struck_s, history.generations()[0])
        assert back_s < stretched(4.0), f"{back_s:.1f} s: as long as setup"


@pytest.mark.long
def test_without_a_standby_the_survivors_go_on_alone_if_the_job_says_so() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(nodes="1:2", steps=500, setup_s=6.0, on_loss="shrink", pace_s=0.03)
        job.wait_step(5, 90.0)
        job.order("kill", Kill(rank=1, step=30))
        job.wait_over(deadline_s=120.0)
        history = job.check(job.injection("kill"), Injection("planned"))
        generations = [history.of(g)[0].world_size for g in history.generations()]
        assert generations[:3] == [2, 1, 2]


@pytest.mark.long
def test_without_either_everyone_waits_and_status_says_for_whom() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=150, setup_s=5.0)
        job.wait_step(20, 90.0)
        survivor, dead = job.worker(0), job.worker(1)
        (lost,) = (node for node in cluster.nodes if dead in node.pids())
        killed = Injection("exit", pids=(dead,), struck_s=now_s())
        kill(dead)
        waits = eventually(lambda: job.row()["waiting_for"], 10.0, "status names what the job waits for")
        assert lost.name in waits
        assert "start" in waits
        assert job.row()["health"] == "degraded"
        assert alive(survivor)
        job.wait_over()
        history = job.check(killed)
        assert survivor in job.workers().values()
        assert history.generations() == [1, 2]
        assert not job.row()["waiting_for"]


def standby(node: Node, workers: set[int]) -> int:
    """The process that is kept ready on a node; 0 while there is none."""
    return next((pid for pid in node.children()[1:] if pid not in workers), 0)


def standbys_ready(node: Node) -> int:
    log = (node.folder / "state" / "jobs" / "job" / "agent" / "agent.log").read_text()
    return log.count('"event": "standby.ready"')


def test_a_standby_that_dies_is_replaced_and_charged_to_nobody() -> None:
    with Cluster(nodes=1, slots=2) as cluster:
        job = cluster.submit(steps=2000, standby=1, restarts={"budget": 0}, pace_s=0.01)
        (node,) = cluster.nodes
        job.wait_step(10)
        workers = set(job.workers().values())
        eventually(lambda: standbys_ready(node) == 1, 20.0, "a standby")
        first = standby(node, workers)
        kill(first)
        second = eventually(lambda: (s := standby(node, workers)) != first and s, 20.0, "another standby")
        eventually(lambda: standbys_ready(node) == 2, 20.0, "and it gets ready")
        assert alive(second)
        there = job.history.step()
        job.wait_step(there + 20)
        row = job.row()
        assert (row["phase"], row["restarts"], row["incidents"]) == ("running", 0, 0)
        assert set(job.workers().values()) == workers
        cluster.api("POST", "/v1/jobs/job/stop", {})
        eventually(lambda: job.phase() == "stopped", 15.0)
        cluster.workers_gone()


@pytest.mark.long
def test_a_standby_overtakes_a_replacement_that_began_after_it() -> None:
    """Two deaths in a row, the second while the next standby is still in its `setup`: that one comes first."""
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=700, setup_s=6.0, standby=1, pace_s=0.03)
        job.wait_step(5, 90.0)
        (node,) = (n for n in cluster.nodes if job.worker(1) in n.pids())
        eventually(lambda: standbys_ready(node) == 1, 30.0, "a standby")
        first = Injection("exit", pids=(job.worker(1),), struck_s=now_s())
        kill(*first.pids)
        eventually(lambda: set(job.workers_of(2)) == {0, 1}, 20.0, "the standby has taken over")
        coming = eventually(lambda: standby(node, set(job.workers().values())), 20.0, "the next standby")
        there = job.history.step()
        job.wait_step(there + 60)  # two seconds ahead of a worker that starts now
        assert standbys_ready(node) == 1, "the machine is too slow for this test, or the next one was ready at once"
        second = Injection("exit", pids=(job.worker(1),), struck_s=now_s())
        kill(*second.pids)
        eventually(lambda: set(job.workers_of(3)) == {0, 1}, 30.0, "the world is whole again")
        assert job.workers_of(3)[1] == coming
        job.wait_over(deadline_s=120.0)
        job.check(first, second)
