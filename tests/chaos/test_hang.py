"""A worker that does not end but does not go on either: it is found, its stack is kept, only it is replaced (G3)."""

from __future__ import annotations

import signal

import pytest
from chaos.harness import Cluster, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import alive, kill

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

STEPS = 80


def test_stopped_spinning_and_asleep() -> None:
    """SIGSTOP from outside, an endless loop and a call that does not come back, each in another rank."""
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(steps=STEPS, hang={"floor_s": 1.0, "ceiling_s": 20.0})
        job.order("spin", rank=1, step=25, do="spin")
        job.order("asleep", rank=3, step=50, do="sleep", seconds=600)
        job.wait_step(8)
        stopped = job.worker(2)
        struck_s = now_s()
        kill(stopped, signal.SIGSTOP)
        job.wait_over(deadline_s=90.0)
        history = job.check()
        assert not alive(stopped)
        assert history.generations() == [1, 2, 3, 4]
        assert history.back_s(struck_s, 1) < 8.0
        for name in ("spin", "asleep"):
            struck = history.struck(name)
            assert not alive(int(str(struck["pid"])))
        assert final_sha256(history) == undisturbed(4, STEPS)
        incidents = job.incidents()
        assert [i["ranks"] for i in incidents] == [[2], [1], [3]]  # only the culprit, each time
        assert {i["kind"] for i in incidents} == {"hang"}
        assert "strike" in str(incidents[1]["stacks"])  # the function it spins in
        cluster.workers_gone()


def test_who_waits_before_the_forward_is_no_culprit() -> None:
    """Rank 0 loops before an all_reduce of the script's own, then before the exchange of BatchNorm's buffers."""
    with Cluster(nodes=2, slots=2) as cluster:
        rules = {"floor_s": 1.0, "ceiling_s": 20.0}
        job = cluster.submit(steps=STEPS, hang=rules, env={"NORM": "1", "ASK": "1"})
        job.order("asking", rank=0, step=20, place="ask", do="spin")
        job.order("norm", rank=0, step=50, do="spin")
        job.wait_over(deadline_s=90.0)
        history = job.check()
        incidents = job.incidents()
        assert [(i["kind"], i["ranks"], i["steps_lost"]) for i in incidents] == [("hang", [0], 0)] * 2
        culprits = {int(str(history.struck(name)["pid"])) for name in ("asking", "norm")}
        first, *_, last = history.generations()
        before, after = set(job.workers_of(first).values()), set(job.workers_of(last).values())
        assert len(before & after) >= 2  # both innocents of the first loop are the same processes to the end
        assert before - after <= culprits
        cluster.workers_gone()
