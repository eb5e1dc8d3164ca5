"""What is charged: a job that fails too often, a node where workers die, a replica that drifted apart (G10)."""

from __future__ import annotations

import pytest
from chaos.harness import Cluster, Job, Node, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import kill
from support.wait import eventually

from elastic.testing import Call, Injection, Kill

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.mark.long
def test_more_failures_than_the_budget_allows_stop_the_job() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=5000, restarts={"budget": 2, "window_s": 600.0, "backoff_s": 0.1})
        for count, step in enumerate((15, 60, 100), start=1):
            job.order(f"kill{count}", Kill(rank=count % 2, step=step))
        job.wait_over("failed")
        job.told(job.injection("kill1"), job.injection("kill2"), job.injection("kill3", recovered=False))
        row = job.row()
        assert row["restarts"] == 3
        assert "failed 3 times within 600 s, at most 2 allowed (restarts.budget)" in row["reason"]
        assert "SIGKILL" in row["reason"]
        cluster.workers_gone()


@pytest.mark.long
def test_node_where_workers_die_is_excluded_and_returns_after_uncordon() -> None:
    with Cluster(nodes=3, slots=1) as cluster:
        job = cluster.submit(nodes="1:3", steps=100_000, pace_s=0.03, restarts={"backoff_s": 0.1})
        job.wait_step(10)
        bad, injections = cluster.nodes[2], []
        for generation in (1, 2, 3):
            mine = eventually(lambda g=generation: worker_on(job, bad, g), 40.0, f"a worker in generation {generation}")  # type: ignore[misc]
            injections.append(Injection("exit", pids=(mine,), struck_s=now_s()))
            kill(mine)
        eventually(lambda: world_size(job) == 2, 20.0, "the others go on without it")
        row = eventually(lambda: (r := job.row())["excluded_nodes"] and r, 10.0, "status says so")
        assert row["excluded_nodes"] == [bad.name]
        assert row["phase"] == "running"
        eventually(
            lambda: not [p for p in bad.pids() if bad.daemon and p != bad.daemon.pid], 20.0, "nothing runs there"
        )
        assert next(n for n in cluster.api("GET", "/v1/nodes")["nodes"] if n["node"] == bad.name)["state"] == "ready"

        cluster.api("POST", f"/v1/nodes/{bad.name}/uncordon", {})
        eventually(lambda: world_size(job) == 3, 60.0, "it is taken back")
        assert job.row()["excluded_nodes"] == []
        job.stop()
        # It is left out with the third failure, or at a boundary right after it; then it is taken in again.
        changes = [Injection("planned")] * (len(job.incidents()) - len(injections))
        assert len(changes) in (1, 2)
        job.check(*injections, *changes)


def worker_on(job: Job, node: Node, generation: int) -> int:
    """The worker on a node that has stepped in this generation; 0 while none has."""
    mine = [c.process for c in job.history.of(generation) if c.node == node.name]
    return int(mine[-1].rpartition(".")[2]) if mine else 0


def world_size(job: Job) -> int:
    history = job.history
    return history.of(history.generations()[-1])[0].world_size


DRIFT = """
import time
from elastic.checkpoint.stored.find import peek

made = t.setup

def setup(job):
    global state
    state = made(job)
    return state

def drift():
    end_s = time.monotonic() + 60.0
    while not any(step == 30 for step, _, _ in peek("CHECKPOINTS")) and time.monotonic() < end_s:
        time.sleep(0.01)  # it is written beside the training
    with torch.no_grad():  # as a flipped bit in the memory of one machine
        state.model[0].weight[3, 5] += 0.5

t.setup = setup
"""


@pytest.mark.parametrize("policy", ["stop", pytest.param("rollback", marks=pytest.mark.long)])
def test_a_replica_that_drifted_apart_is_named(policy: str) -> None:
    with Cluster(nodes=3, slots=1) as cluster:
        checkpoint = {"dir": str(cluster.folder / "checkpoints"), "every_steps": 30}
        script = cluster.script("drift", DRIFT.replace("CHECKPOINTS", checkpoint["dir"]))
        job = cluster.submit(
            steps=100, script=script, fingerprint_every_steps=5, on_bad_numbers=policy, checkpoint=checkpoint,
        )  # fmt: skip
        job.order("drift", Call(rank=1, step=32, place="commit", function="__main__:drift"))
        if policy == "stop":
            job.wait_over("failed")
            said = job.row()["reason"]
        else:
            job.wait_over()
            assert final_sha256(job.history) == undisturbed(3, 100)
            (incident,) = job.incidents()
            assert "step 30" in incident["restored_from"]
            said = incident["detail"]
        assert "drift on rank 1" in said
