"""What `job.log` gives over real kills: one line for each step of the job, no gap and nothing twice."""

from __future__ import annotations

import json

import pytest
from chaos.harness import Cluster
from support.wait import eventually

from elastic.testing import Kill

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

STEPS = 60


@pytest.mark.parametrize(
    ("place", "then"), [("commit", "data"), pytest.param("forward", "forward", marks=pytest.mark.long)]
)
def test_a_killed_rank_0_leaves_no_gap_and_no_double(place: str, then: str) -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        folder = cluster.folder / "tensorboard"
        job = cluster.submit(steps=STEPS, env={"LOG": "1"}, tensorboard=str(folder))
        job.order("kill", Kill(rank=0, step=20, place=place))
        job.wait_struck("kill")
        job.wait_step(30)
        job.order("again", Kill(rank=0, step=40, place=then))
        job.wait_over()
        job.check(job.injection("kill"), job.injection("again"), lost=2)
        found = [json.loads(line) for line in (folder / "job" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in found] == list(range(1, STEPS + 1))
        assert all(line["values"]["number"] == line["step"] for line in found)
        assert len({line["values"]["rank"] for line in found} - {0.0}) <= 1, "rank 1 where rank 0 was lost, at most"
        assert list((folder / "job").glob("events.out.tfevents.*"))
        last = {"number": float(STEPS), "rank": 0.0}
        eventually(lambda: job.row()["logged"] == last, 15.0, "the last values are shown")


def test_a_lost_node_of_rank_0_leaves_no_gap_and_no_double() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        folder = cluster.folder / "tensorboard"
        job = cluster.submit(steps=STEPS, env={"LOG": "1"}, tensorboard=str(folder), nodes="1:2")
        job.wait_step(20)
        first = next(c.node for c in job.history.commits if c.rank == 0)
        next(node for node in cluster.nodes if node.name == first).kill_all()
        job.wait_over()
        found = [json.loads(line) for line in (folder / "job" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in found] == list(range(1, STEPS + 1))
