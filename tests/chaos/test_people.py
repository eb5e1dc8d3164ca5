"""What people do to a running job costs it no step: drain, scale, a node that joins, stop."""

from __future__ import annotations

import signal

import pytest
from chaos.harness import Cluster, Job, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import alive, kill
from support.wait import eventually

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def until(job: Job, *, world_size: int) -> None:
    """Until the newest generation that commits has this size."""

    def there() -> bool:
        history = job.history
        return history.of(history.generations()[-1])[0].world_size == world_size

    eventually(there, 40.0, f"a world of {world_size}")


def test_drain_scale_join() -> None:
    with Cluster(nodes=3, slots=1) as cluster:
        job = cluster.submit(nodes="1:2", steps=100_000, pace_s=0.03, join_wait_s=2.0)
        job.wait_step(20)
        until(job, world_size=2)

        cluster.api("POST", "/v1/jobs/job/scale", {"nodes": "1:3"})
        until(job, world_size=3)
        keeps = eventually(lambda: len(now := job.workers()) == 3 and now, 10.0, "all three have committed")

        cluster.api("POST", "/v1/nodes/node1/drain", {"reason": "a new disk"})
        until(job, world_size=2)
        eventually(lambda: not [p for p in cluster.nodes[1].pids() if p != cluster.nodes[1].daemon.pid], 15.0, "empty")  # type: ignore[union-attr]
        assert next(n for n in cluster.api("GET", "/v1/nodes")["nodes"] if n["node"] == "node1")["reason"]
        there = job.history.step()
        eventually(lambda: job.history.step() > there + 10, 10.0)
        assert set(job.workers().values()) < set(keeps.values())

        cluster.api("POST", "/v1/nodes/node1/uncordon", {})
        until(job, world_size=3)

        job.stop()
        history = job.check(*[Injection("planned")] * len(job.incidents()))
        assert history.gaps_s()  # their size is what benchmarks/faults.py measures, on a quiet machine
        assert all(i["steps_lost"] == 0 for i in job.incidents())
        cluster.workers_gone()


def test_job_stop_ends_workers_on_all_nodes() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=100_000)
        job.wait_step(10)
        workers = job.workers()
        cluster.api("POST", "/v1/jobs/job/stop", {"reason": "enough"})
        eventually(lambda: not any(map(alive, workers.values())), 15.0, "the workers end")
        eventually(lambda: job.phase() == "stopped", 15.0)
        assert "enough" in job.row()["reason"]
        job.told()
        cluster.workers_gone()


@pytest.mark.long
def test_cordoned_node_keeps_its_workers_and_gets_no_new_job() -> None:
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(nodes="2", workers_per_node=1, steps=100_000, pace_s=0.03)
        job.wait_step(10)
        workers = job.workers()
        cluster.api("POST", "/v1/nodes/node1/cordon", {"reason": "a noisy fan"})
        rows = {row["node"]: row for row in cluster.api("GET", "/v1/nodes")["nodes"]}
        assert (rows["node1"]["state"], rows["node1"]["reason"]) == ("cordoned", "a noisy fan")
        wide = cluster.submit("wide", nodes="2", workers_per_node=1, steps=30)
        waits = eventually(lambda: wide.row()["waiting_for"], 10.0, "the second job waits")
        assert "node1" in waits
        there = job.history.step()
        job.wait_step(there + 20)
        assert job.workers() == workers

        cluster.api("POST", "/v1/nodes/node1/uncordon", {})
        wide.wait_over()
        wide.check()
        job.stop()
        assert job.check().generations() == [1]


@pytest.mark.long
def test_sigterm_that_takes_the_job_below_min_nodes_saves_a_checkpoint_first() -> None:
    """Below min: a checkpoint is taken at the very step where the world stops, and the job goes on from there."""
    steps = 200
    with Cluster(nodes=2, slots=1) as cluster:
        folder = cluster.folder / "checkpoints"
        job = cluster.submit(
            nodes="2", steps=steps, pace_s=0.03, stop_grace_s=30.0, checkpoint={"dir": str(folder), "every_s": 3600.0}
        )
        job.wait_step(20)
        node = cluster.nodes[1]
        assert node.stop_daemon() == 0
        struck_s = now_s()
        kill(node.agent_pid(), signal.SIGTERM)
        eventually(lambda: not node.pids(), 30.0, "nothing is left there")
        stopped_at = job.history.step()
        saved = [int(p.name.removeprefix("step-")) for p in folder.rglob("step-*") if (p / "manifest.json").exists()]
        assert saved == [stopped_at]
        assert job.row()["waiting_for"] or job.phase() == "waiting"
        node.start()
        job.wait_over()
        history = job.check(Injection(("drain", "planned"), nodes=(node.name,), struck_s=struck_s), lost=0)
        assert final_sha256(history) == undisturbed(2, steps)
