"""etcd and the daemons fail: training does not notice; a failure meanwhile waits, with all state kept (G4, G5)."""

from __future__ import annotations

import signal

import pytest
from chaos.harness import Cluster, Job, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import kill
from support.wait import eventually, holds

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def steps_on(job: Job, more: int = 20) -> None:
    there = job.history.step()
    eventually(lambda: job.history.step() >= there + more, 30.0, f"{more} steps after {there}")


@pytest.mark.long
def test_etcd_and_daemons_come_and_go() -> None:
    """In one run: daemons killed and started, etcd killed beyond every lease, paused, and back."""
    steps, pace_s, more = 400, 0.1, 10
    with Cluster(nodes=2, slots=1) as cluster:
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=steps, pace_s=pace_s)
        job.wait_step(20)
        workers = job.workers()

        for node in cluster.nodes:
            node.kill_daemon()
        steps_on(job, more)
        for node in cluster.nodes:
            node.start(wait=False)
        eventually(lambda: all(n.state() == "ready" for n in cluster.nodes), 40.0, "both are in the cluster")

        etcd.kill()
        lease_s = cluster.timeouts["lease_ttl_s"]
        steps_on(job, int((lease_s + 1.0) / pace_s))
        cluster.start_etcd()
        eventually(lambda: all(n.state() == "ready" for n in cluster.nodes), 15.0, "the daemons are back")
        steps_on(job, more)

        etcd.pause()
        steps_on(job, int(2 * lease_s / pace_s))  # the daemons notice a silent one later
        etcd.cont()

        assert job.workers() == workers
        job.hurry()
        job.wait_over(deadline_s=90.0)
        history = job.check(told=True)
        assert history.generations() == [1]
        assert final_sha256(history) == undisturbed(2, steps)
        assert max(history.gaps_s()) < 1.0
        for node in cluster.nodes:  # no rank stopped stepping, so there is no incident; the journal has the outages
            contact = [e["connected"] for e in node.events() if e["event"] == "etcd.contact"]
            assert contact.count(False) >= 2, contact


@pytest.mark.long
def test_a_failure_while_etcd_is_away_waits_and_is_repaired() -> None:
    steps = 150
    with Cluster(nodes=2, slots=1) as cluster:
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=steps)
        job.wait_step(20)
        survivor = job.worker(0)
        etcd.kill()
        killed = Injection("exit", pids=(job.worker(1),), struck_s=now_s())
        kill(*killed.pids, signal.SIGKILL)
        there = eventually(lambda: job.history.step(), 5.0)
        holds(lambda: job.history.step() <= there + 3, 4.0, "nobody steps on alone")
        cluster.start_etcd()
        job.wait_over(deadline_s=60.0)
        history = job.check(killed)
        assert history.generations() == [1, 2]
        assert survivor in job.workers().values()
        assert final_sha256(history) == undisturbed(2, steps)


def test_etcd_wiped_and_started_empty() -> None:
    """Agents write lost records again; no step is lost."""
    steps = 240
    with Cluster(nodes=2, slots=1) as cluster:
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=steps, pace_s=0.05)
        job.wait_step(20)
        workers = job.workers()
        etcd.kill()
        etcd.wipe()
        cluster.start_etcd()
        steps_on(job)
        root = "/elastic/chaos/jobs/job/"
        wanted = {
            f"{root}{name}" for name in ("head/spec", "head/state", "head/generation", "members/node0", "members/node1")
        }
        eventually(
            lambda: wanted <= set(etcd.ctl("get", "--prefix", root, "--keys-only").stdout.split()), 15.0, "all is back"
        )
        assert job.workers() == workers
        job.hurry()
        job.wait_over()
        history = job.check()
        assert history.generations() == [1]
        assert final_sha256(history) == undisturbed(2, steps)


@pytest.mark.long
def test_etcd_set_back_to_a_backup_goes_on_with_what_is_newer() -> None:
    """A job goes on without a lost step; what was lifted and forgotten since the backup stays so."""
    steps = 600
    with Cluster(nodes=2, slots=1) as cluster:
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=steps, pace_s=0.05, nodes="1:1")
        job.wait_step(20)
        workers = job.workers()
        free = next(f"node{at}" for at in range(2) if f"node{at}" not in str(workers))
        cluster.api("POST", f"/v1/nodes/{free}/cordon", {"reason": "old"})
        etcd.kill()
        etcd.back_up()
        cluster.start_etcd()
        steps_on(job)
        eventually(lambda: cluster.api("POST", f"/v1/nodes/{free}/uncordon") or True, 10.0)
        cluster.api("POST", "/v1/jobs/job/scale", {"nodes": "1:2"})
        eventually(lambda: len(job.workers()) == 2, 60.0)
        steps_on(job)
        workers = job.workers()
        etcd.kill()
        etcd.set_back()
        cluster.start_etcd()
        steps_on(job)

        def repaired() -> bool:
            seen = cluster.api("GET", "/v1/status")
            states = {row["state"] for row in seen["nodes"]}
            return not seen["etcd"]["refused"] and states == {"ready"} and cluster.api("GET", "/v1/jobs/job")["phase"]

        eventually(repaired, 60.0, "nothing is refused, no node is cordoned")
        assert cluster.api("GET", "/v1/jobs/job")["spec"]["nodes"] == "1:2"
        assert job.workers() == workers
        job.hurry()
        job.wait_over()
        assert job.check().generations() == [1, 2]
