"""The queue: a job that cannot run now holds back no smaller one that can, and is not starved by them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from elastic.contract.records.job_records import GenerationNode, GenerationRecord, Phase
from elastic.contract.records.node_records import KnownNode
from elastic.contract.records.reasons import Code, codes, listed, reason, reasons
from elasticd.cluster import assignment
from elasticd.cluster.assignment import RESERVED_AFTER_S, plan
from elasticd.cluster.cluster import Cluster, Job, Node

from .test_assignment import cluster, job, member, node, where

LATE_S = RESERVED_AFTER_S + 1


def test_a_job_that_cannot_fit_leaves_idle_slots_to_a_smaller_one() -> None:
    made = plan(cluster([node("a"), node("b")], [job("j1", "3:3"), job("j2"), job("j3", "2:2")]), {}, "a")
    assert where(made) == {"j1": [], "j2": ["a"], "j3": []}
    assert made.queue == ("j3",), "j1 is larger than the cluster"


def test_a_job_that_can_never_run_says_so_at_once_and_is_not_in_the_queue() -> None:
    made = plan(cluster([node("a"), node("b")], [job("j1", "2:2", workers=8)]), {}, "a")
    assert (made.queue, made.never) == ((), {"j1"})
    never = reason(Code.NEVER, needs="16 workers on 2 nodes", capacity="4 slots on 2 nodes")
    assert never in reasons(made.waiting["j1"])
    auto = plan(cluster([node("a")], [job("j1", "2:2", workers="auto")]), {}, "a")
    assert auto.waiting["j1"] == reason(Code.NEVER, needs="2 nodes", capacity="2 slots on 1 node")


def test_a_job_that_waits_for_a_lost_or_cordoned_node_may_run_again() -> None:
    lost = {"b": KnownNode.of(node("b").record, 5.0)}
    made = plan(replace(cluster([node("a")], [job("j1", "2:2")]), known=lost), {}, "a")
    why = listed(reason(Code.TOO_FEW, count=0, least=2), reason(Code.NODE_IS, node="b", state="lost"))
    assert (made.queue, made.waiting["j1"]) == (("j1",), why)
    draining = plan(cluster([node("a"), node("b", draining="r")], [job("j1", "2:2")]), {}, "a")
    assert draining.queue == ("j1",)


def test_slots_are_reserved_for_a_job_that_has_waited_and_its_rival_is_told() -> None:
    held = replace(job("j1"), members={"a": member("a")})
    pair = cluster([node("a"), node("b")], [held, job("j2", "2:2"), job("j3")])
    assert where(plan(pair, {}, "a", 1.0)) == {"j1": ["a"], "j2": [], "j3": ["b"]}
    made = plan(pair, {}, "a", LATE_S)
    assert where(made) == {"j1": ["a"], "j2": [], "j3": []}
    assert made.queue == ("j2", "j3")
    assert reason(Code.RESERVED, node="b", other="j2") in reasons(made.waiting["j3"])
    assert Code.RESERVED not in codes(made.waiting["j2"])


def test_nodes_are_reserved_for_the_first_that_has_waited_alone() -> None:
    """Behind it smaller jobs still take what it does not need."""
    nodes = [node(name) for name in "abc"]
    jobs = [replace(job("j1"), members={"a": member("a")}), replace(job("j2"), members={"b": member("b")})]
    made = plan(cluster(nodes, [*jobs, job("j3", "2:2"), job("j4", "3:3"), job("j5")]), {}, "a", LATE_S)
    assert where(made)["j5"] == [], "c is reserved for j3"
    assert reason(Code.RESERVED, node="c", other="j3") in reasons(made.waiting["j4"])
    four = plan(cluster([*nodes, node("d")], [jobs[0], job("j3", "4:4"), job("j4", "4:4"), job("j5")]), {}, "a", LATE_S)
    assert {"a", "b", "c", "d"} == {r.values["node"] for r in reasons(four.waiting["j5"]) if r.code is Code.RESERVED}


def test_a_job_that_has_agents_is_completed_before_an_older_one_begins() -> None:
    """Else each would hold what the other one needs, for ever."""
    begun = replace(job("j2", "2:2"), members={"a": member("a")})
    made = plan(cluster([node("a"), node("b")], [job("j1", "2:2"), begun]), {}, "a", LATE_S)
    assert where(made) == {"j1": [], "j2": ["a", "b"]}


def test_a_job_with_live_state_takes_what_there_is_below_its_minimum() -> None:
    """Its state is safer on two nodes than on one."""
    places = tuple(GenerationNode(node=n, incarnation="i", host=n, slots=(0,)) for n in ("a", "x", "y"))
    formed = GenerationRecord(number=1, nodes=places, store_host="", store_port=1, leader="a", why="")
    waiting = replace(job("j1", "3:3", phase="waiting"), members={"a": member("a")}, generation=formed)
    assert where(plan(cluster([node("a"), node("b")], [waiting]), {}, "a")) == {"j1": ["a", "b"]}


# ── random histories ────────────────────────────────────────────────────────────────────────────────────────


def random_cluster(chance: random.Random) -> Cluster:
    nodes = [node(f"n{n}", chance.choice((1, 2, 4)), n + 1) for n in range(chance.randint(1, 5))]
    jobs = []
    for at in range(chance.randint(1, 7)):
        low = chance.randint(1, 3)
        new = job(f"j{at}", f"{low}:{low + chance.randint(0, 2)}", chance.choice((1, 1, 2, 4, "auto")), at + 1)
        if chance.random() < 0.3:
            on = chance.sample(nodes, min(low, len(nodes)))
            new = replace(new, members={n.name: member(n.name, 1, at + 1) for n in on})
        jobs.append(new)
    return cluster(nodes, jobs)


@pytest.mark.parametrize("seed", range(60))
def test_a_queued_job_takes_nothing_and_changes_no_other_jobs_places(seed: int) -> None:
    made = plan(seen := random_cluster(random.Random(seed)), {}, "n0")
    for name in (*made.queue, *made.never):
        assert not made.places[name] or seen.jobs[name].members
    for name in made.queue:
        others = replace(seen, jobs={n: j for n, j in seen.jobs.items() if n != name})
        without = {n: places for n, places in where(made).items() if n != name}
        assert where(plan(others, {}, "n0")) == without, f"{name} waits, and holds back another job"


@pytest.mark.parametrize("seed", range(60))
def test_reservations_overbook_no_node_and_hold_for_the_queue_alone(seed: int) -> None:
    seen = random_cluster(random.Random(seed))
    made, before = plan(seen, {}, "n0", LATE_S), plan(seen, {}, "n0")
    for name, on in seen.nodes.items():
        fresh = {j: s[name] for j, s in made.places.items() if name in s and name not in seen.jobs[j].members}
        held = sum(1 for j in seen.jobs.values() if name in j.members)
        assert not fresh or held + sum(fresh.values()) <= on.record.slots
    if not before.queue:
        assert where(made) == where(before), "nothing is reserved where no job is queued"
    assert where(plan(seen, {}, "n0", LATE_S)) == where(made)


class Rush:
    """A large job among small ones that come as fast as others end, in random order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.nodes: list[Node] = [node(f"n{n}", 2, n + 1) for n in range(4)]
        self.jobs: dict[str, Job] = {}
        self.count = 0

    def submit(self, nodes: str, workers: int, now_s: float) -> str:
        self.count += 1
        new = job(f"j{self.count}", nodes, workers, self.count, since_wall_s=now_s)
        self.jobs[new.name] = new
        return new.name

    def turns(self, most: int) -> Iterator[float]:
        """Each ten seconds one job ends and two small ones come; the plan is carried out."""
        for turn in range(most):
            now_s = 10.0 * turn
            yield now_s
            for name, places in plan(cluster(self.nodes, list(self.jobs.values())), {}, "n0", now_s).places.items():
                members = {n: member(n, slots, 1) for n, slots in places.items()}
                self.jobs[name] = replace(self.jobs[name], members=members)
            if running := sorted(n for n, j in self.jobs.items() if j.members):
                del self.jobs[self.chance.choice(running)]
            for _ in range(2):
                self.submit("1:1", self.chance.choice((1, 1, 2)), now_s)

    def runs(self, large: str, most: int) -> bool:
        return any(large not in self.jobs or self.jobs[large].members for _ in self.turns(most))


@pytest.mark.parametrize("seed", range(8))
def test_a_large_job_is_not_starved_by_small_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def begins() -> bool:
        rush = Rush(seed)
        for _ in range(12):
            rush.submit("1:1", 1, 0.0)
        return rush.runs(rush.submit("3:4", 2, 0.0), 160)

    assert begins()
    if seed == 0:  # the small ones alone would not leave it room
        monkeypatch.setattr(assignment, "RESERVED_AFTER_S", 1e9)
        assert not begins()


def test_phase_of_a_job_that_stops_is_no_matter_of_the_queue() -> None:
    stopping = job("j1", "2:2")
    stopping = replace(stopping, state=msgspec.structs.replace(stopping.state, phase=Phase.STOPPING))
    assert plan(cluster([node("a")], [stopping]), {}, "a").queue == ()
