"""A fire wall that refuses looks like a death, from both its sides. Two nodes that call each other dead and still reach
etcd must not go on alone in turns, each over the other's steps."""

from __future__ import annotations

import pytest
from support import says
from support.jobs import Machine, broken, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.job_records import GenerationRecord
from elastic.contract.timeouts import Timeouts
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import Effect, Publish, PutMember
from elastic.recovery.machine.events import (
    Joined,
    PeerDead,
    PeerReachable,
    Progress,
    Start,
    Viewed,
)

SPEC = JobSpec(name="job", script="train.py", nodes="1:2")
BOTH = generation(1, [place("a"), place("b")])
REFUSED = "connection refused"


def job_view(formed: GenerationRecord) -> JobView:
    return view(member("a", 0), member("b", 1), spec=SPEC, formed=formed)


def alone(node: str, number: int) -> GenerationRecord:
    return generation(number, [place(node)])


class Stepping(Machine):
    """The agent of b, whose worker steps in BOTH with a's."""

    def __init__(self) -> None:
        super().__init__(policy("b", spec=SPEC))
        self.take(Start(), Joined(), says.ready(0, 1), Viewed(job_view(BOTH), True))
        self.take(says.synced(0, 1, 1, 7), says.stepping(0, 1, 1, 8), Progress(1, 8, 0.1))


def published(effects: list[Effect]) -> list[str]:
    return ["".join(p.node for p in e.change.nodes) for e in effects if isinstance(e, Publish)]


def complaints(effects: list[Effect]) -> list[tuple[str, ...]]:
    return [e.record.unreachable for e in effects if isinstance(e, PutMember)]


@pytest.fixture
def outrun() -> Stepping:
    """It has called a dead, and a was quicker to go on without it."""
    machine = Stepping()
    assert published(machine.take(PeerDead("a", "a.1", REFUSED))) == ["b"]
    effects = machine.take(Viewed(job_view(alone("a", 2)), True))
    assert not published(effects)
    assert complaints(effects) == [("a",)]
    return machine


def test_the_dead_that_goes_on_alone_lives_and_is_not_gone_over(outrun: Stepping) -> None:
    assert not published(outrun.wait(2.0))
    assert not published(outrun.take(PeerDead("a", "a.1", REFUSED)))
    assert not published(outrun.wait(60.0))


def test_falsely_suspected_leader_that_formed_alone_is_not_excluded_by_the_left_out_node() -> None:
    machine = Stepping()
    assert not published(machine.take(Viewed(job_view(alone("a", 2)), True)))
    effects = machine.take(PeerDead("a", "a.1", REFUSED))
    assert not published(effects)
    assert complaints(effects) == [("a",)]
    assert not published(machine.wait(60.0))


def test_node_left_out_by_its_own_loss_or_by_plan_accepts_a_reported_death() -> None:
    for formed, failed in ((alone("a", 2), broken(1, "b", 0)), (generation(2, [place("a")], at_step=9), None)):
        machine = Stepping()
        if failed:
            machine.take(Viewed(view(member("a", 0), member("b", 1), spec=SPEC, formed=BOTH, failed=failed), True))
        machine.take(Viewed(job_view(formed), True))
        assert published(machine.take(PeerDead("a", "a.1", REFUSED))) == ["b"]


def test_peer_that_was_reachable_again_is_accepted_as_dead_on_a_new_refusal(outrun: Stepping) -> None:
    assert complaints(outrun.take(PeerReachable("a", "a.1"))) == [()]
    assert published(outrun.take(PeerDead("a", "a.1", REFUSED))) == ["b"]


def test_successor_of_a_falsely_suspected_agent_can_be_declared_dead(outrun: Stepping) -> None:
    successor = view(
        member("a", 9, worker_id=2), member("b", 1), spec=SPEC, formed=generation(3, [place("a", worker_id=2)])
    )
    outrun.take(Viewed(successor, True))
    assert published(outrun.take(PeerDead("a", "a.2", REFUSED))) == ["b"]


def test_leader_that_died_right_after_admitting_the_node_is_declared_dead() -> None:
    machine = Stepping()
    machine.take(PeerDead("a", "a.1", REFUSED))
    effects = machine.take(Viewed(job_view(generation(2, [place("a"), place("b")])), True))
    assert published([*effects, *machine.wait(2.0)]) == ["b"]


def test_peer_whose_lease_outlives_its_reported_death_is_reported_unreachable_instead() -> None:
    machine = Stepping()
    machine.take(PeerDead("a", "a.1", REFUSED), Viewed(job_view(alone("b", 2)), True))
    machine.wait(Timeouts().lease_ttl_s + 2.0)
    assert complaints(machine.take(PeerDead("a", "a.1", REFUSED))) == [("a",)]
