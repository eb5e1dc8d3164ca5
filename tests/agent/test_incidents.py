"""Incidents of real processes, compared with what the test did: see also `simulation/test_incidents.py`."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from support.agents import Job
from support.incidents import check_incident
from support.wait import eventually, stretched

from elastic.contract.records.job_records import Phase, encode

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def redone(job: Job) -> int:
    """Steps that were committed, and committed again in a later generation."""
    generations: dict[int, set[int]] = {}
    for line in job.commits():
        generations.setdefault(line["step"], set()).add(line["generation"])
    return sum(len(of) > 1 for of in generations.values())


def stop(job: Job) -> None:
    job.etcd.put(job.keys.state, encode(msgspec.structs.replace(job.state(), phase=Phase.STOPPING)))


def test_workers_a_node_and_a_stop() -> None:
    with Job(nodes="2:2", args={"steps": 100_000, "step-ms": 5}) as job:
        job.wait_step(30)
        eventually(lambda: len(job.statuses()) == 2, 10.0, "both agents report their workers")
        struck_s = time.time()
        job.kill_rank(1)
        job.kill_rank(2)
        (first,) = eventually(job.incidents, 20.0, "recovery")
        check_incident(
            first, kind="exit", redone=redone(job), world_sizes=(4, 4),
            struck_wall_s=struck_s, back_wall_s=time.time(),
        )  # fmt: skip
        # The second is killed some milliseconds after the first: perhaps when that one's recovery has begun.
        exits = [c for c in first.causes if c.kind == "exit"]
        assert ({c.node for c in exits}, sorted(c.ranks for c in exits)) == ({"n0", "n1"}, [(1,), (2,)])

        there, before = job.steps(), redone(job)
        job.wait_step(there + 20)
        struck_s = time.time()
        job.kill_node("n1")
        outage = eventually(lambda: [i for i in job.all_incidents() if i.open and i.kind == "lost"], 10.0, "a record")[
            0
        ]
        assert (outage.node, len(outage.ranks), outage.ended_wall_s) == ("n1", 2, None)
        assert outage.wall_s - struck_s < stretched(2.0)
        job.start_agent("n1")
        second = eventually(lambda: (found := job.incidents())[1:] and found[1], 30.0, "the node is back")
        check_incident(
            second, kind="lost", nodes=["n1"], ranks=outage.ranks, redone=redone(job) - before,
            struck_wall_s=struck_s, back_wall_s=time.time(),
        )  # fmt: skip

        there = job.steps()
        job.wait_step(there + 20)
        job.kill_rank(3)
        stop(job)
        eventually(lambda: all(agent.poll() is not None for agent in job.agents.values()), 30.0, "the end")
        third = job.incidents()[2]
        assert (third.kind, third.ranks, third.world_size_after) == ("exit", (3,), 0)
        assert not any(incident.open for incident in job.all_incidents())


@pytest.mark.long
def test_all_agents_are_killed() -> None:
    with Job(nodes="2:2", workers=1, args={"steps": 100_000, "step-ms": 20}) as job:
        eventually(lambda: (p := job.progress()) and p.step >= 50, 40.0, "progress on record")
        struck_s = time.time()
        for node in ("n0", "n1"):
            job.kill_node(node)
        reached = job.steps()
        time_away_s = 3.0
        eventually(lambda: time.time() > struck_s + time_away_s, 10.0, "nobody is there")
        for node in ("n0", "n1"):
            job.start_agent(node)
        (incident,) = eventually(job.incidents, 40.0, "begun again")
        check_incident(
            incident, kind="lost", nodes=["n0", "n1"], ranks=[0, 1], world_sizes=(2, 2), back_wall_s=time.time()
        )
        job.wait_step(reached)
        eventually(lambda: redone(job) >= reached, 20.0, "all steps are done again")
        assert incident.steps_lost is not None
        assert 0 < incident.steps_lost <= reached, "as far as the last record of it says"
        assert incident.steps_lost_at_most is None, "what was committed after the last record is not known"
        assert incident.wall_s <= struck_s + 0.1, "from the last step on record, not from the new agents' start"
        assert max(incident.timeline_s.values()) > time_away_s


PLAIN = """
import signal
signal.pause()
"""


def test_a_script_without_elastic(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    with Job(nodes="1:1", script=script) as job:
        eventually(lambda: (s := job.statuses().get("n0")) and all(r.pid for r in s.ranks), 20.0, "it runs")
        job.kill_rank(1)
        (incident,) = eventually(job.incidents, 20.0, "recovery")
        check_incident(incident, kind="exit", nodes=["n0"], ranks=[1], world_sizes=(2, 2))
        assert (incident.steps_lost, incident.step) == (None, None), "nobody knows how far such a script has come"
        stop(job)
        eventually(lambda: job.agents["n0"].poll() is not None, 30.0, "the end")
