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
