"""Everything dies at once: the job resumes from the newest checkpoint that passes its checks (G6)."""

from __future__ import annotations

import pytest
from chaos.harness import Cluster
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import end_all
from support.wait import eventually

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def test_all_agents_and_workers_killed_at_once() -> None:
    steps, every = 120, 20
    with Cluster(nodes=2, slots=1) as cluster:
        folder = cluster.folder / "checkpoints"
        job = cluster.submit(steps=steps, checkpoint={"dir": str(folder), "every_steps": every})
        job.wait_step(50)
        eventually(lambda: (folder / "job" / "step-40").exists() or (folder / "step-40").exists(), 10.0, "checkpoint")
        daemons = {n.daemon.pid for n in cluster.nodes if n.daemon}
        end_all(p for n in cluster.nodes for p in n.pids() if p not in daemons)
        at = job.history.step()
        job.wait_over(deadline_s=90.0)
        # The agents that come after know of the job what stood on record: its last step there, at most 2 s old.
        history = job.check(Injection("lost", nodes=("node0", "node1")), lost=at)
        resumed = min(c.step for c in history.commits if c.generation == history.generations()[-1])
        assert resumed % every == 0
        assert at - resumed <= every + 15
        assert final_sha256(history) == undisturbed(2, steps)
