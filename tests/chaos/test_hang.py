"""A worker that does not end but does not go on either: it is found, its stack is kept, only it is replaced (G3)."""

from __future__ import annotations

import signal

import pytest
from chaos.harness import Cluster, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import alive, kill
from support.wait import eventually

from elastic.contract.records.reasons import Code, reason
from elastic.testing import Call, Hang, Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

STEPS = 80


@pytest.mark.long
def test_stopped_spinning_and_asleep() -> None:
    """SIGSTOP from outside, an endless loop and a call that does not come back, each in another rank."""
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(steps=STEPS, hang={"floor_s": 1.0, "ceiling_s": 20.0})
        job.order("spin", Hang(rank=1, step=25))
        job.order("asleep", Call(rank=3, step=50, function="signal:pause"))
        job.wait_step(8)
        stopped = job.worker(2)
        struck_s = now_s()
        kill(stopped, signal.SIGSTOP)
        job.wait_over(deadline_s=90.0)
        history = job.check(
            Injection("hang", pids=(stopped,), struck_s=struck_s, within_s=8.0),
            *(job.injection(name, "hang", within_s=8.0) for name in ("spin", "asleep")),  # only the culprit, each time
        )
        assert not alive(stopped)
        assert history.generations() == [1, 2, 3, 4]
        assert history.back_s(struck_s, 1) < 8.0
        for name in ("spin", "asleep"):
            assert not alive(job.struck(name).pid)
        assert final_sha256(history) == undisturbed(4, STEPS)
        incidents = job.incidents()
        assert "strike" in str(incidents[1]["stacks"])  # the function it spins in
        cluster.workers_gone()


@pytest.mark.long
def test_rank_waiting_before_the_forward_is_not_called_hung() -> None:
    """Rank 0 loops before an all_reduce of the script's own, then before the exchange of BatchNorm's buffers."""
    with Cluster(nodes=2, slots=2) as cluster:
        rules = {"floor_s": 1.0, "ceiling_s": 20.0}
        job = cluster.submit(steps=STEPS, hang=rules, env={"NORM": "1", "ASK": "1"})
        job.order("asking", Hang(rank=0, step=20, place="collective"))
        job.order("norm", Hang(rank=0, step=50))
        job.wait_over(deadline_s=90.0)
        history = job.check(*(job.injection(name, "hang", within_s=20.0) for name in ("asking", "norm")))
        culprits = {job.struck(name).pid for name in ("asking", "norm")}
        first, *_, last = history.generations()
        before, after = set(job.workers_of(first).values()), set(job.workers_of(last).values())
        assert len(before & after) >= 2  # both innocents of the first loop are the same processes to the end
        assert before - after <= culprits
        cluster.workers_gone()


@pytest.mark.long
def test_a_rank_that_is_stuck_after_its_gradients_are_handed_over() -> None:
    """Its page says that it waits for the others, and they have all gone on: each node has one rank, so its agent must
    hear that from the other one. First a call keeps the GIL; then the main thread loops in a callback of the backward.
    """
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=STEPS, hang={"floor_s": 3.0, "ceiling_s": 30.0})
        job.order("late", Hang(rank=0, step=20, for_s=1.5))
        job.order("gil", Call(rank=1, step=20, place="backward", function="__main__:keep_the_lock"))
        job.order("stuck", Call(rank=0, step=50, place="backward", function="__main__:spin_when_all_is_handed_over"))
        struck = job.wait_struck("gil")
        job.wait_over(deadline_s=90.0)
        history = job.check(
            job.injection("gil", "hang", within_s=15.0, words=(str(Code.DEAF.sentence),)),
            job.injection("stuck", "hang", within_s=30.0, words=("while exchanging at step 50",)),
        )
        assert not alive(struck.pid)
        assert history.back_s(struck.at_s, 1) < 15.0
        assert not alive(job.struck("stuck").pid)
        assert final_sha256(history) == undisturbed(2, STEPS)
        cluster.workers_gone()


@pytest.mark.long
def test_survivor_busy_before_its_first_step_keeps_its_process_in_a_second_failure() -> None:
    """The survivors open their data for 5 s on each entry. One rank is killed, and its successor again while the
    survivors are at that: they cannot hear yet that this generation is over, too."""
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=STEPS, hang={"floor_s": 1.0, "ceiling_s": 60.0}, env={"PRELUDE_S": "5"})
        job.wait_step(10)
        survivor = job.worker(0)
        killed = Injection("exit", pids=(job.worker(1),), struck_s=now_s(), words=("(and 1 more)",))
        kill(*killed.pids, signal.SIGKILL)
        entered = eventually(lambda: sorted(job.folder.glob(f"entered.2.{survivor}.json")), 30.0, "it enters again")
        second = eventually(
            lambda: [p for p in job.folder.glob("entered.2.*.json") if p not in entered], 30.0, "so does the successor"
        )
        kill(int(second[0].name.split(".")[2]), signal.SIGKILL)
        job.wait_over(deadline_s=120.0)
        history = job.check(killed)  # the second is a part of the same outage
        assert job.worker(0) == survivor
        causes = [(c["kind"], c["node"], c["generation"]) for c in job.incidents()[0]["causes"] if c["kind"] == "exit"]
        (node,) = {c.node for c in history.commits if c.rank == 1}
        assert causes == [("exit", node, 1), ("exit", node, 2)]
        assert final_sha256(history) == undisturbed(2, STEPS)
        cluster.workers_gone()


def test_job_with_a_rank_that_returned_from_train_is_not_healthy() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        limits, folder = {"floor_s": 1.0, "ceiling_s": 2.0}, cluster.folder / "checkpoints"
        job = cluster.submit(steps=STEPS, hang=limits, checkpoint={"dir": str(folder)})
        job.order("leave", Call(rank=1, step=20, function="__main__:leave"))
        job.wait_struck("leave")
        row = eventually(lambda: seen if (seen := job.row())["health"] != "healthy" else None, 20.0, "it is said")
        named = eventually(
            lambda: still if (still := job.row()["no_progress"]) and still["rank"] == 1 else None, 20.0, "rank 1 is"
        )
        assert named["node"] == next(c.node for c in job.history.commits if c.rank == 1)
        assert named["because"] == str(reason(Code.HAS_RETURNED, place="step 22"))
        assert row["health"] == "degraded"
        assert job.row()["waiting_for"].startswith("no progress since ")
        eventually(lambda: job.row()["no_progress"]["for_s"] > 4.0, 20.0, "the ceiling passes")
        assert job.incidents() == []
        assert job.history.generations() == [1]
        job.stop()
        cluster.workers_gone()
