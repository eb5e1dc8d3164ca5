"""A node whose lease has run out while the job's steps advance is cut off from etcd, not dead (G4)."""

from __future__ import annotations

from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import GenerationNode, GenerationRecord, MemberRecord
from elastic.contract.records.reasons import Code, reason
from elastic.recovery.facts.membership import Change, NodeLimits, Situation, Wait, next_generation
from elastic.recovery.facts.view import JobView

LIMITS = NodeLimits(min_nodes=1, max_nodes=3, join_wait_s=0.0)


def member(node: str, create_revision: int) -> Member:
    return Member(
        MemberRecord(node=node, incarnation=f"{node}-1", host="h", port=1, slots=1, ready=(0,)), create_revision
    )


def decide(present: list[str], *, steps_advance: bool) -> Change | Wait:
    places = tuple(GenerationNode(node=n, incarnation=f"{n}-1", host="h", slots=(0,), port=1) for n in ("a", "b"))
    current = GenerationRecord(number=1, nodes=places, store_host="h", store_port=1, leader="a", why="first")
    view = JobView(members={n: member(n, i) for i, n in enumerate(present)}, generation=current)
    return next_generation(
        Situation(view, current, LIMITS, frozenset(), steps_advance=steps_advance, settled=True, min_reached_for_s=9.0)
    )


def test_node_with_expired_lease_keeps_its_place_while_steps_advance() -> None:
    verdict = decide(["a"], steps_advance=True)
    assert isinstance(verdict, Wait)
    assert verdict.reason == reason(Code.UNHEARD, nodes="b")


def test_new_node_is_not_admitted_while_a_place_holder_is_unheard_and_steps_advance() -> None:
    assert isinstance(decide(["a", "c"], steps_advance=True), Wait)


def test_node_with_expired_lease_is_removed_once_steps_stop() -> None:
    verdict = decide(["a"], steps_advance=False)
    assert isinstance(verdict, Change)
    assert [place.node for place in verdict.nodes] == ["a"]


def test_new_node_is_admitted_as_planned_if_all_place_holders_are_present() -> None:
    verdict = decide(["a", "b", "c"], steps_advance=True)
    assert isinstance(verdict, Change)
    assert verdict.planned
