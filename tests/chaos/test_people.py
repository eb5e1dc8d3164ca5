"""What people do to a running job costs it no step: drain, scale, a node that joins, stop."""

from __future__ import annotations

import pytest
from chaos.harness import Cluster, Job
from support.procs import alive
from support.wait import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def until(job: Job, *, world: int) -> None:
    """Until the newest generation that commits has this size."""

    def there() -> bool:
        history = job.history
        return history.of(history.generations()[-1])[0].world == world

    eventually(there, 40.0, f"a world of {world}")


def test_drain_scale_join() -> None:
    with Cluster(nodes=3, slots=1) as cluster:
        job = cluster.submit(nodes="1:2", steps=900, pace_s=0.03, join_wait_s=2.0)
        job.wait_step(20)
        until(job, world=2)

        cluster.api("POST", "/v1/jobs/job/scale", {"nodes": "1:3"})
        until(job, world=3)
        keeps = job.workers()

        cluster.api("POST", "/v1/nodes/node1/drain", {"reason": "a new disk"})
        until(job, world=2)
        eventually(lambda: not [p for p in cluster.nodes[1].pids() if p != cluster.nodes[1].daemon.pid], 15.0, "empty")  # type: ignore[union-attr]
        assert next(n for n in cluster.api("GET", "/v1/nodes")["nodes"] if n["node"] == "node1")["reason"]
        there = job.history.step()
        eventually(lambda: job.history.step() > there + 10, 10.0)
        assert set(job.workers().values()) < set(keeps.values())

        cluster.api("POST", "/v1/nodes/node1/uncordon", {})
        until(job, world=3)

        job.wait_over()
        history = job.check()
        assert history.gaps_s()  # their size is what benchmarks/faults.py measures, on a quiet machine
        assert all(i["steps_lost"] == 0 for i in job.incidents())
        kinds = [i["kind"] for i in job.incidents()]
        assert set(kinds) == {"planned"}, kinds
        cluster.workers_gone()


def test_stop_ends_it_everywhere() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=100_000)
        job.wait_step(10)
        workers = job.workers()
        cluster.api("POST", "/v1/jobs/job/stop", {"reason": "enough"})
        eventually(lambda: not any(map(alive, workers.values())), 15.0, "the workers end")
        eventually(lambda: job.phase() == "stopped", 15.0)
        assert "enough" in job.row()["reason"]
        cluster.workers_gone()
