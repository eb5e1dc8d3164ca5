"""What is on record at the instant at which a job ends."""

from __future__ import annotations

import pytest
from chaos.harness import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def test_a_job_that_has_succeeded_is_never_seen_at_an_earlier_step() -> None:
    """Progress is written every 2 s: the last step was on record up to a second after the result."""
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=60)
        job.wait_over()
        cluster.workers_gone()
        seen: list[tuple[str, int]] = []
        phase, step = "", 0
        for key, record in cluster.control_history(job.name):
            if key == "state" and record:
                phase = record["phase"]
            elif key == "progress" and record:
                step = record["step"]
            seen.append((phase, step))
        assert ("succeeded", 60) in seen
        assert [each for each in seen if each[0] == "succeeded" and each[1] != 60] == []
        job.check()
