"""A rank that is slower than the others is named, with real agents and workers on two nodes."""

from __future__ import annotations

from typing import Any

import pytest
from chaos.harness import Cluster, Job
from support.wait import eventually

from elasticd.ctl.client import Client
from elasticd.ctl.jobs.top import look

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

SLOW = 2
"""Of ranks 0 to 3; the nodes have two each."""

BODY = f"""
import time
plain = t.F.mse_loss

def loss(*given):
    slowed = t.rank == {SLOW} and not (t.FOLDER / "even").exists()
    time.sleep(0.06 if slowed else 0.02)
    return plain(*given)

t.F.mse_loss = loss
"""


def slow_ranks(job: Job) -> list[dict[str, Any]]:
    known = job.row()["step_time"]
    return list(known["slow_ranks"]) if known else []


def top_slow_ranks(client: Client, name: str) -> list[int]:
    rows = [row.step_time for row in look(client, name).jobs if row.step_time is not None]
    return [each.rank for step_time in rows for each in step_time.slow_ranks]


@pytest.mark.long
def test_a_rank_slower_than_the_median_is_named_until_it_is_not_any_more() -> None:
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(
            script=cluster.script("slow", BODY), steps=100_000, pace_s=0.0, debug={"window_s": 0.4}, snapshots="off"
        )
        named = eventually(lambda: found if len(found := slow_ranks(job)) == 1 else [], 60.0, "one rank is named")
        node = next(row["node"] for row in job.row()["ranks"] if row["rank"] == SLOW)
        assert [(each["rank"], each["node"]) for each in named] == [(SLOW, node)]
        assert named[0]["ratio"] > 1.3
        client = Client(str(cluster.nodes[0].socket))
        eventually(
            lambda: top_slow_ranks(client, job.name) == [SLOW],
            30.0, "the same in what `elasticctl top` shows",
        )  # fmt: skip
        told = eventually(
            lambda: [e for e in cluster.api("GET", "/v1/events?job=job")["events"] if e["kind"] == "rank.slow"],
            30.0, "the event of it",
        )  # fmt: skip
        assert {e["node"] for e in told} == {node}
        (job.folder / "even").touch()
        eventually(lambda: not slow_ranks(job), 60.0, "no rank is named any more")
        job.stop()
