"""A fire wall that refuses what it does not let through: each of two nodes looks dead to the other, and neither is."""

from __future__ import annotations

import math

import pytest
from chaos.harness import Cluster
from support.wait import eventually

from elastic.contract.timeouts import Timeouts

pytestmark = [pytest.mark.chaos, pytest.mark.etcd, pytest.mark.netns]

PACE_S = 0.03
BEYOND_THE_LEASE = math.ceil(2 * Timeouts().lease_ttl_s / PACE_S)
"""Steps until well after the one that goes on has come to doubt that the other is dead."""


@pytest.mark.long
def test_two_that_refuse_each_other_do_not_go_on_in_turns() -> None:
    """The first that goes on alone shows that it lives; the other waits with its state until it is answered again."""
    with Cluster(nodes=2, slots=1, network=True) as cluster:
        assert cluster.hosts is not None
        job = cluster.submit(nodes="1:2", steps=700, pace_s=PACE_S)
        job.wait_step(20)
        workers = set(job.workers().values())
        here, there = cluster.nodes[0].host, cluster.nodes[1].host
        assert here is not None
        assert there is not None
        for host, other in ((here, there), (there, here)):
            host.filter(f"ip saddr {other.address} tcp flags & rst == 0x0 reject with tcp reset")
        eventually(lambda: len(job.history.generations()) == 2, 60.0, "one goes on alone")
        job.wait_step(job.history.step() + BEYOND_THE_LEASE)
        assert len(job.history.generations()) == 2
        cluster.hosts.heal()
        job.wait_over(deadline_s=120.0)
        job.check()
        assert set(job.workers().values()) == workers
        control = [r for key, r in cluster.control_history("job") if key == "generation" and r is not None]
        # Both, perhaps both once or twice more (their connections broke before their lines did), one alone, both.
        # In the same instant each may have published itself alone; one of these never steps, and no more follow.
        said = [r["why"] for r in control]
        assert len(control) <= 6, said
        assert sum(len(r["nodes"]) == 1 for r in control) <= 2, said  # type: ignore[arg-type, misc]
