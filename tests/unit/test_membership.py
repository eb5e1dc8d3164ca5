"""Which node leads, which nodes are in the next generation, and in which order: the edges of each rule."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import broken, generation, member, place, view

from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import BrokenRecord, GenerationRecord
from elastic.contract.records.reasons import Code, listed, reason
from elastic.recovery.facts.membership import (
    Change,
    NodeLimits,
    Situation,
    Wait,
    arrange,
    by_preference,
    leader,
    living,
    next_generation,
)
from elastic.recovery.facts.state_holders import all_workers_lost
from elastic.recovery.facts.view import Dead, JobView

NOBODY: Dead = frozenset()
LIMITS = NodeLimits(min_nodes=1, max_nodes=3, join_wait_s=5.0)
ABC = generation(4, [place("a"), place("b"), place("c")])
ALL = (member("a", 1), member("b", 2), member("c", 3))


def decide(
    job_view: JobView,
    current: GenerationRecord | None,
    *,
    limits: NodeLimits = LIMITS,
    dead: Dead = NOBODY,
    steps_advance: bool = False,
    settled: bool = True,
    reached_s: float = 0.0,
    blind: bool = False,
    in_place: bool = True,
    last_committed: GenerationRecord | None = None,
) -> Change | Wait:
    return next_generation(
        Situation(
            job_view,
            current,
            limits,
            dead,
            steps_advance=steps_advance,
            settled=settled,
            min_reached_for_s=reached_s,
            blind=blind,
            in_place=in_place,
            last_committed=last_committed,
        )
    )


def nodes(verdict: Change | Wait) -> list[str]:
    assert isinstance(verdict, Change), verdict
    return [p.node for p in verdict.nodes]


def waits(verdict: Change | Wait) -> Wait:
    assert isinstance(verdict, Wait), verdict
    return verdict


def test_a_node_of_a_generation_that_steps_is_not_passed_over_because_its_record_lags() -> None:
    """The record is as old as etcd is slow: before the steps, the workers of that node were being started."""
    lagging = view(member("a", 1), member("b", 2, ready=()), member("c", 3))
    assert waits(decide(lagging, ABC, steps_advance=True)).steady
    leaves = view(member("a", 1), member("b", 2, ready=(), draining="off"), member("c", 3))
    assert nodes(decide(leaves, ABC, steps_advance=True)) == ["a", "c"]
    anew = view(member("a", 1), member("b", 2, ready=(), worker_id=2), member("c", 3))
    assert nodes(decide(anew, ABC, steps_advance=True)) == ["a", "c"]


# ── the leader ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_leader_is_a_draining_leader_candidate_while_one_is_present() -> None:
    """Beyond these not all see the members of a large job."""
    leaving = view(member("a", 1, draining="off"), member("b", 2, draining="off"), member("c", 3))
    assert leader(leaving, NOBODY, ABC, leader_candidates=2) == "a"
    assert leader(leaving, NOBODY, ABC, leader_candidates=3) == "c"
    assert leader(leaving, frozenset({("a", "a.1")}), ABC, leader_candidates=2) == "c"


def test_leader_of_an_empty_view_is_none() -> None:
    assert leader(view(), NOBODY, None) is None
    assert leader(view(), NOBODY, ABC) is None


def test_before_the_first_generation_the_oldest_leads() -> None:
    assert leader(view(member("a", 9), member("b", 3)), NOBODY, None) == "b"


def test_then_the_lowest_node_rank_leads_however_young() -> None:
    assert leader(view(member("a", 9), member("b", 3), member("c", 1)), NOBODY, ABC) == "a"


@pytest.mark.parametrize(
    ("job_view", "dead"),
    [
        (view(*ALL), frozenset({("a", "a.1")})),
        (view(*ALL[1:]), NOBODY),
        (view(member("a", worker_id=2), *ALL[1:]), NOBODY),
        (view(member("a", draining="maintenance"), *ALL[1:]), NOBODY),
        (view(*ALL, excluded_nodes=("a",)), NOBODY),
    ],
    ids=["proven dead", "lease gone", "a new agent, without the state", "about to leave", "set aside"],
)
def test_leader_is_the_next_node_when_the_first_is_dead(job_view: JobView, dead: Dead) -> None:
    assert leader(job_view, dead, ABC) == "b"


def test_when_all_leave_the_first_of_them_leads() -> None:
    assert leader(view(*(member(n, draining="off") for n in "abc")), NOBODY, ABC) == "a"


def test_when_the_whole_generation_is_gone_the_oldest_of_the_others_leads() -> None:
    assert leader(view(member("y", 8), member("x", 7)), NOBODY, ABC) == "x"


def test_dead_agent_does_not_make_its_successor_on_the_node_dead() -> None:
    assert set(living(view(member("a", worker_id=2)), frozenset({("a", "a.1")}))) == {"a"}


# ── the first forming ───────────────────────────────────────────────────────────────────────────────────────────────


def test_fewer_than_min_nodes_do_not_begin() -> None:
    verdict = waits(decide(view(ALL[0]), None, limits=NodeLimits(2, 3, 0.0), reached_s=1e9))
    assert verdict.below_min
    assert verdict.reason == reason(Code.TOO_FEW, count=1, least=2)


def test_first_generation_waits_briefly_at_min_nodes_and_then_forms() -> None:
    limits = NodeLimits(2, 3, 5.0)
    assert not waits(decide(view(*ALL[:2]), None, limits=limits, reached_s=4.999)).below_min
    assert nodes(decide(view(*ALL[:2]), None, limits=limits, reached_s=5.0)) == ["a", "b"]


def test_first_generation_forms_at_once_with_max_nodes() -> None:
    assert nodes(decide(view(*ALL), None)) == ["a", "b", "c"]


def test_of_too_many_the_oldest_begin() -> None:
    assert nodes(decide(view(*ALL, member("z", 0)), None)) == ["z", "a", "b"]


@pytest.mark.parametrize(
    "unfit", [member("b", 2, ready=()), member("b", 2, draining="off")], ids=["no worker stands", "about to leave"]
)
def test_unfit_node_does_not_count_toward_min_nodes(unfit: Member) -> None:
    assert waits(decide(view(ALL[0], unfit), None, limits=NodeLimits(2, 3, 0.0))).below_min


# ── a failure ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_broken_generation_is_followed_at_once_by_one_of_all_present_nodes() -> None:
    verdict = decide(view(*ALL, formed=ABC, failed=broken(4, "a", 0)), ABC, settled=False)
    assert nodes(verdict) == ["a", "b", "c"], "the replacement takes the dead one's rank"
    assert isinstance(verdict, Change)
    assert not verdict.planned
    assert verdict.why == reason(Code.BROKE, "planted", kind="exit", node="a")


def test_the_failure_of_an_older_generation_is_history() -> None:
    assert waits(decide(view(*ALL, formed=ABC, failed=broken(3, "a", 0)), ABC)).steady


def test_new_node_takes_the_place_of_a_lost_node() -> None:
    job_view = view(ALL[0], ALL[2], member("x", 9), formed=ABC)
    assert nodes(decide(job_view, ABC)) == ["a", "x", "c"]


def test_membership_below_min_nodes_waits_and_names_the_missing_node() -> None:
    verdict = waits(decide(view(*ALL[:2], formed=ABC), ABC, limits=NodeLimits(3, 3, 0.0)))
    assert verdict.below_min
    assert verdict.reason == listed(reason(Code.NODE_GONE, node="c"), reason(Code.TOO_FEW, count=2, least=3))


def test_just_min_nodes_go_on() -> None:
    assert nodes(decide(view(*ALL[:2], formed=ABC), ABC, limits=NodeLimits(2, 3, 0.0))) == ["a", "b"]


@pytest.mark.parametrize(
    ("job_view", "dead"),
    [(view(*ALL), frozenset({("b", "b.1")})), (view(ALL[0], member("b", 9, worker_id=2), ALL[2]), NOBODY)],
    ids=["its port refuses", "another agent is there"],
)
def test_proof_of_death_counts_even_while_steps_advance(job_view: JobView, dead: Dead) -> None:
    """The last steps of a world still trickle in when one of it is dead already."""
    verdict = decide(job_view, ABC, dead=dead, steps_advance=True)
    assert isinstance(verdict, Change)
    assert [p for p in verdict.nodes if p in ABC.nodes] == [place("a"), place("c")]
    assert not verdict.planned


def test_blind_leader_waits_for_absent_nodes_after_a_failure() -> None:
    failed = broken(4, "a", 0)
    assert waits(decide(view(*ALL[:2], failed=failed), ABC, blind=True)).reason == reason(Code.ETCD_WAS_AWAY, nodes="c")
    assert nodes(decide(view(*ALL[:2], failed=failed), ABC)) == ["a", "b"]


def test_blind_leader_forms_at_once_if_no_node_is_absent() -> None:
    assert nodes(decide(view(*ALL, failed=broken(4, "a", 0)), ABC, blind=True)) == ["a", "b", "c"]


def test_a_rollback_is_to_the_snapshot() -> None:
    verdict = decide(view(*ALL, failed=broken(4, "a", rollback=True)), ABC)
    assert isinstance(verdict, Change)
    assert verdict.restore == "snapshot"


@pytest.mark.parametrize(("settled", "restore"), [(False, "snapshot"), (True, "newest")])
def test_a_rollback_that_was_cut_short_is_not_over(settled: bool, restore: str) -> None:
    back = generation(4, ABC.nodes, restore="snapshot")
    verdict = decide(view(*ALL, failed=broken(4, "b", 0)), back, settled=settled)
    assert isinstance(verdict, Change)
    assert verdict.restore == restore


def test_store_host_outside_the_generation_is_needed_until_the_first_step() -> None:
    """The node that hands over and leaves hosts the store of the generation that it is not in."""
    current = generation(4, [place("b"), place("c")], leader="a")
    assert not isinstance(decide(view(*ALL, formed=current), current, settled=False), Change)
    lost = decide(view(*ALL[1:], formed=current), current, settled=False)
    assert isinstance(lost, Change)
    assert lost.why == reason(Code.NODE_GONE, node="a")
    assert waits(decide(view(*ALL[1:], formed=current), current, settled=True)).steady


# ── a planned change ────────────────────────────────────────────────────────────────────────────────────────────────


def test_membership_with_all_nodes_present_needs_no_change() -> None:
    assert waits(decide(view(*ALL), ABC)).steady


def test_a_newcomer_is_taken_in_at_a_boundary_once_steps_advance() -> None:
    two = generation(4, ABC.nodes[:2])
    assert waits(decide(view(*ALL), two)).reason == reason(Code.STANDS_STILL)
    assert waits(decide(view(*ALL), two, settled=False, steps_advance=True)).reason == reason(Code.NOT_STEPPED)
    verdict = decide(view(*ALL), two, steps_advance=True)
    assert nodes(verdict) == ["a", "b", "c"]
    assert isinstance(verdict, Change)
    assert verdict.planned
    assert verdict.why == reason(Code.JOINS, node="c")


def test_a_script_without_elastic_shows_no_steps_and_is_changed_without() -> None:
    assert nodes(decide(view(*ALL), generation(4, ABC.nodes[:2]), in_place=False)) == ["a", "b", "c"]


def test_a_newcomer_above_max_nodes_is_a_spare() -> None:
    assert waits(decide(view(*ALL, member("x", 0)), ABC, steps_advance=True)).steady


def test_draining_node_is_replaced_by_the_spare_with_the_reason_given() -> None:
    job_view = view(ALL[0], member("b", 2, draining="maintenance"), ALL[2], member("x", 9))
    verdict = decide(job_view, ABC, steps_advance=True)
    assert nodes(verdict) == ["a", "x", "c"]
    assert isinstance(verdict, Change)
    assert verdict.why == listed(reason(Code.LEAVES, "maintenance", node="b"), reason(Code.JOINS, node="x"))


def test_node_beyond_new_limits_leaves_with_these_as_the_reason() -> None:
    """The agent may see them before the daemon orders it to leave: the verdict on the change is the same."""
    verdict = decide(view(*ALL), ABC, limits=NodeLimits(1, 1, 5.0), steps_advance=True)
    assert isinstance(verdict, Change)
    assert nodes(verdict) == ["a"]
    why = reason(Code.SURPLUS, nodes="1:1")
    assert verdict.why == listed(*(reason(Code.LEAVES, why, node=node) for node in "bc"))
    assert verdict.planned


def test_draining_node_stays_if_leaving_would_go_below_min_nodes() -> None:
    job_view = view(*ALL[:2], member("c", 3, draining="maintenance"))
    verdict = waits(decide(job_view, ABC, limits=NodeLimits(3, 3, 0.0), steps_advance=True))
    assert verdict.below_min
    assert verdict.reason == reason(Code.TOO_FEW_STAY, count=2, least=3)


def test_draining_node_that_alone_holds_the_state_stays_to_hand_it_over() -> None:
    one = generation(4, [place("a")])
    job_view = view(member("a", 1, draining="off"), member("x", 9))
    assert nodes(decide(job_view, one, steps_advance=True, limits=NodeLimits(1, 1, 0.0))) == ["a", "x"]


def test_excluded_node_hands_over_its_state_if_all_others_are_lost_before_a_step() -> None:
    current = generation(5, [place("b")])
    job_view = view(*ALL[:2], formed=current, failed=broken(5, "b", 0), excluded_nodes=("a",))
    assert nodes(decide(job_view, current, settled=False, last_committed=generation(4, [place("b"), place("a")]))) == [
        "b",
        "a",
    ]
    restarted = generation(4, [place("b"), place("a", worker_id=7)])
    assert nodes(decide(job_view, current, settled=False, last_committed=restarted)) == ["b"]
    partly = view(member("a", 1), member("b", 2, ready=(0, 1)), failed=broken(5, "b", 0), excluded_nodes=("a",))
    both = generation(5, [place("b", 0, 1)])
    assert nodes(decide(partly, both, settled=False, last_committed=ABC)) == ["b"]


def test_the_only_holder_of_the_state_is_waited_for_while_etcd_has_just_lost_its_data() -> None:
    """It has left the generation that is broken and had not stepped; the spare there would begin from setup."""
    job_view = view(member("x", 9), failed=broken(5, "b", 0))
    current, older = generation(5, [place("b"), place("x")]), generation(4, [place("a"), place("b")])
    gone = frozenset({("b", "b.1")})

    def decided(job_view: JobView, dead: Dead = gone, *, blind: bool = True, settled: bool = False) -> Change | Wait:
        return decide(job_view, current, dead=dead, blind=blind, settled=settled, last_committed=older)

    assert waits(decided(job_view)).reason == reason(Code.ETCD_WAS_AWAY, nodes="a")
    assert nodes(decided(job_view, blind=False)) == ["x"]
    assert nodes(decided(job_view, settled=True)) == ["x"], "x may have the state, too"
    assert nodes(decided(job_view, gone | {("a", "a.1")})) == ["x"]
    back = view(member("x", 9), member("a", 10, draining="off"), failed=broken(5, "b", 0))
    assert nodes(decided(back)) == ["a", "x"]


def test_excluded_node_is_used_if_no_other_node_is_left() -> None:
    job_view = view(*ALL[:1], failed=broken(5, "a", 0), excluded_nodes=("a",))
    alone = generation(5, [place("a")])
    assert nodes(decide(job_view, alone)) == ["a"]
    both = view(*ALL[:2], failed=broken(5, "a", 0), excluded_nodes=("a",))
    assert nodes(decide(both, generation(5, [place("a"), place("b")]))) == ["b"]


def test_a_node_beyond_a_new_maximum_hands_over_its_state_before_it_leaves() -> None:
    """It may be the only one that committed the last step, as an excluded one."""
    fewer = NodeLimits(min_nodes=1, max_nodes=1, join_wait_s=5.0)
    failed = view(*ALL, failed=broken(4, "a", 0))
    assert nodes(decide(failed, ABC, limits=fewer)) == ["a", "b", "c"]
    assert nodes(decide(view(*ALL), ABC, limits=fewer, steps_advance=True)) == ["a"]


def test_excluded_node_hands_over_its_state_before_it_leaves() -> None:
    """It may be the only one that committed the last step, and goes at the next planned change."""
    current = generation(5, [place("a", 0, 1), place("b")])
    both = member("a", 1, ready=(0, 1)), member("b", 2)
    assert nodes(decide(view(*both, failed=broken(5, "a", 0), excluded_nodes=("a",)), current)) == ["a", "b"]
    assert nodes(decide(view(*both, failed=broken(5, "a", 0, 1), excluded_nodes=("a",)), current)) == ["b"]
    assert nodes(decide(view(*both, excluded_nodes=("a",)), current, steps_advance=True)) == ["b"]


def test_a_node_that_a_planned_change_leaves_out_hands_over_its_state_if_that_breaks_before_a_step() -> None:
    """For whatever reason it was left out: the generation before may have ended short of the boundary."""
    last_committed = generation(4, [place("a"), place("b")])
    job_view = view(*ALL[:2], failed=broken(5, "b", 0), excluded_nodes=("a",))
    partly = view(member("a", 1), member("b", 2, ready=(0, 1)), failed=broken(5, "b", 0), excluded_nodes=("a",))
    for at_step, asked in ((None, ["b"]), (7, ["b", "a"])):
        current = generation(5, [place("b", 0, 1)], at_step=at_step)
        assert nodes(decide(partly, current, settled=False, last_committed=last_committed)) == asked
    assert nodes(decide(job_view, current, settled=True, last_committed=last_committed)) == ["b"]


def test_of_the_nodes_without_a_place_the_one_with_the_newest_state_hands_it_over() -> None:
    """All workers of c have died. A place is free for a, which is older as a member, and has older state than b."""
    spares = [member("a", 1), member("b", 2)]
    held = [
        dataclasses.replace(spare, record=msgspec.structs.replace(spare.record, held_generation=number))
        for spare, number in zip(spares, (3, 5), strict=True)
    ]
    job_view = view(*held, member("c", 3), failed=broken(6, "c", 0))
    for max_nodes, chosen in ((1, ["c", "b"]), (2, ["c", "a", "b"]), (3, ["c", "a", "b"])):
        limits = NodeLimits(min_nodes=1, max_nodes=max_nodes, join_wait_s=5.0)
        assert nodes(decide(job_view, generation(6, [place("c")]), limits=limits)) == chosen


@pytest.mark.parametrize(
    ("consistent", "chosen"), [((3, 5), ["c", "b"]), ((3, 0), ["c", "b", "a"]), ((0, 0), ["c", "b"])]
)
def test_a_node_with_consistent_state_is_asked_if_the_newest_is_not(
    consistent: tuple[int, int], chosen: list[str]
) -> None:
    """The workers of b were left out while they received the state, or in the middle of a step."""
    held = [
        dataclasses.replace(
            spare, record=msgspec.structs.replace(spare.record, held_generation=number, held_consistent=whole)
        )
        for spare, number, whole in zip([member("a", 1), member("b", 2)], (3, 5), consistent, strict=True)
    ]
    job_view = view(*held, member("c", 3), failed=broken(6, "c", 0))
    assert nodes(decide(job_view, generation(6, [place("c")]), limits=NodeLimits(1, 1, 5.0))) == chosen


@pytest.mark.parametrize("draining", [None, "maintenance"])
def test_older_state_is_asked_for_where_only_a_newcomer_is_left(draining: str | None) -> None:
    """All workers that have stepped died before d, which joined in generation 6, had received the state from c."""
    spare = member("a", 1, draining=draining)
    held = dataclasses.replace(spare, record=msgspec.structs.replace(spare.record, held_generation=3))
    job_view, limits = view(held, member("c", 3), member("d", 4), failed=broken(6, "c", 0)), NodeLimits(1, 2, 5.0)
    current, last_committed = generation(6, [place("c"), place("d")]), generation(5, [place("c")])
    found = decide(job_view, current, limits=limits, settled=False, last_committed=last_committed)
    assert sorted(nodes(found)) == ["a", "c", "d"]
    assert sorted(nodes(decide(job_view, current, limits=limits, settled=True))) == ["c", "d"]


def test_older_state_is_asked_for_by_a_newcomer_that_has_seen_no_generation_step() -> None:
    """d leads; generation 5, whose state a has, was over before d knew of its steps. c is gone, too."""
    spare = member("a", 1, draining="maintenance")
    held = dataclasses.replace(spare, record=msgspec.structs.replace(spare.record, held_generation=5))
    job_view, limits = view(held, member("d", 4), failed=broken(6, "c", 0)), NodeLimits(1, 2, 5.0)
    current = generation(6, [place("c"), place("d")])
    assert sorted(nodes(decide(job_view, current, limits=limits, settled=False))) == ["a", "d"]
    assert nodes(decide(job_view, current, limits=limits, settled=True)) == ["d"], "d has the state of generation 6"


def test_state_of_a_generation_that_the_leader_has_not_seen_step_is_asked_for() -> None:
    """Generation 5 stepped on x alone; d leads 6, and knows only of steps in 4, whose state b has."""
    x, b = member("x", 1, draining="maintenance"), member("b", 2)
    holding = dataclasses.replace(x, record=msgspec.structs.replace(x.record, held_generation=5))
    older = dataclasses.replace(b, record=msgspec.structs.replace(b.record, held_generation=4))
    job_view, limits = view(holding, older, member("d", 4), failed=broken(6, "a", 0)), NodeLimits(1, 2, 5.0)
    current, last_committed = generation(6, [place("a"), place("d")]), generation(4, [place("a"), place("b")])
    found = decide(job_view, current, limits=limits, settled=False, last_committed=last_committed)
    assert "x" in nodes(found)


def test_state_that_the_job_has_gone_back_from_is_not_asked_for() -> None:
    """Its loss was NaN in generation 5, say. There is what it went back to in 6."""
    spare = member("a", 1)
    held = dataclasses.replace(spare, record=msgspec.structs.replace(spare.record, held_generation=5))
    job_view, limits = view(held, member("c", 3), failed=broken(6, "c", 0)), NodeLimits(1, 1, 5.0)
    for restore, asked in (("newest", ["c", "a"]), ("snapshot", ["c"])):
        current = generation(6, [place("c")], restore=restore)
        assert nodes(decide(job_view, current, limits=limits)) == asked


def test_node_that_joined_since_the_last_step_is_not_counted_as_state_holder() -> None:
    current, last_committed = generation(5, [place("a"), place("b")]), generation(4, [place("a")])
    job_view = view(*ALL[:2], formed=current, failed=broken(5, "b", 0), excluded_nodes=("a",))
    two = view(member("a", 1), member("b", 2, ready=(0, 1)), failed=broken(5, "b", 0), excluded_nodes=("a",))
    seated = generation(5, [place("a"), place("b", 0, 1)])
    assert nodes(decide(two, seated, settled=False, last_committed=last_committed)) == ["a", "b"]
    assert nodes(decide(two, seated, settled=True, last_committed=last_committed)) == ["a", "b"]
    assert nodes(decide(job_view, current, settled=False, last_committed=last_committed)) == ["a", "b"]


def test_draining_node_whose_workers_died_is_not_kept_for_handover() -> None:
    one = generation(4, [place("a")])
    job_view = view(member("a", 1, draining="off"), member("x", 9), failed=broken(4, "a", 0))
    assert nodes(decide(job_view, one)) == ["x"]


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("slots", "expected"),
    [((), False), ((0,), False), ((0, 1), True), ((0, 1, 2), True)],
    ids=["none", "one", "both", "more"],
)
def test_a_node_is_bereft_when_all_its_workers_are_lost(slots: tuple[int, ...], expected: bool) -> None:
    current = generation(4, [place("a", 0, 1), place("b", 0, 1)])
    assert all_workers_lost(current, "a", broken(4, "a", *slots)) is expected
    assert not all_workers_lost(current, "b", broken(4, "a", *slots))
    assert not all_workers_lost(current, "a", broken(3, "a", *slots))


@pytest.mark.parametrize(
    ("before", "there", "after"),
    [
        ("a01 b01", "a01 b01", "a01 b01"),
        ("a10 b01", "b01 a01", "a10 b01"),
        ("a01 b01", "b01 x01", "x01 b01"),
        ("a01 b01 c01", "c01 b01 x01 y01", "x01 b01 c01 y01"),
        ("a01 b01 c01", "b01 y01 x01", "y01 b01 x01"),
        ("a01 b0 c01", "a01 x01 c01 y0", "a01 y0 c01 x01"),
        ("a01 b01 c01", "a01 c01", "a01 c01"),
        ("a01 b01", "x0 b01", "b01 x0"),
        ("a012 b0", "a20 b0", "a02 b0"),
        ("a02 b0", "a012 b0", "a021 b0"),
        ("a01 b0", "a12 b0", "a21 b0"),
        ("", "b10 a0", "b01 a0"),
    ],
)
def test_every_worker_keeps_its_place_and_newcomers_take_those_that_are_lost(
    before: str, there: str, after: str
) -> None:
    places = tuple(place(name[0], *map(int, name[1:])) for name in before.split())
    chosen = [member(name[0], at, ready=tuple(map(int, name[1:]))) for at, name in enumerate(there.split())]
    found = arrange(generation(4, list(places)) if places else None, chosen)
    assert " ".join(p.node + "".join(map(str, p.slots)) for p in found) == after


def test_an_agent_that_was_started_anew_has_the_place_of_its_predecessor() -> None:
    current = generation(4, [place("a", 0, 1), place("b", 0, 1)])
    chosen = [member("b", 2, ready=(0, 1)), member("a", 9, worker_id=2, ready=(0, 1))]
    assert arrange(current, chosen) == (place("a", 0, 1, worker_id=2), place("b", 0, 1))


def test_a_newcomer_in_the_place_of_a_lost_node_leads_last_until_a_generation_has_stepped() -> None:
    current = generation(4, [place("a"), place("b"), place("c")])
    limits, spare = NodeLimits(1, 3, 0.0), (member("x", 9), member("b", 2), member("c", 3))
    found = decide(view(*spare, formed=current), current, limits=limits)
    assert isinstance(found, Change)
    assert ([p.node for p in found.nodes], found.newcomers) == (["x", "b", "c"], ("x",))
    following = generation(5, list(found.nodes), newcomers=found.newcomers)
    assert leader(view(*spare, formed=following), frozenset(), following) == "b"
    assert [p.node for p in by_preference(following)] == ["b", "c", "x"]
    for settled, newcomers in ((False, ("x",)), (True, ())):
        then = decide(view(*spare[:2], formed=following), following, limits=limits, settled=settled)
        assert isinstance(then, Change)
        assert then.newcomers == newcomers


@st.composite
def job_views(draw: st.DrawFn) -> JobView:
    there = [
        member(
            node,
            draw(st.integers(1, 9)),
            worker_id=draw(st.integers(1, 2)),
            ready=draw(st.sampled_from([(), (0,), (0, 1), (1,)])),
            draining=draw(st.sampled_from([None, None, "off"])),
        )
        for node in draw(st.lists(st.sampled_from("abcd"), unique=True))
    ]
    return view(*there)


generations = st.lists(
    st.builds(place, st.sampled_from("abcd"), st.just(0), st.just(1), worker_id=st.integers(1, 2)),
    min_size=1,
    max_size=4,
    unique_by=lambda p: p.node,
).map(lambda places: generation(4, places))


@given(
    job_view=job_views(),
    current=st.none() | generations,
    least=st.integers(1, 3),
    more=st.integers(0, 2),
    steps_advance=st.booleans(),
    settled=st.booleans(),
    blind=st.booleans(),
    dead=st.frozensets(st.sampled_from("abcd").map(lambda node: (node, f"{node}.1")), max_size=2),
    failed=st.none() | st.builds(broken, st.just(4), st.sampled_from("abcd"), st.integers(0, 1)),
)
def test_next_generation_can_always_form(
    job_view: JobView, current: GenerationRecord | None, least: int, more: int, steps_advance: bool, settled: bool,
    blind: bool, dead: Dead, failed: BrokenRecord | None,
) -> None:  # fmt: skip
    job_view = dataclasses.replace(job_view, generation=current, broken=failed if current else None)
    limits = NodeLimits(least, least + more, 0.0)
    verdict = decide(
        job_view, current, limits=limits, dead=dead, steps_advance=steps_advance, settled=settled, blind=blind
    )
    if isinstance(verdict, Wait):
        assert verdict.reason
        return
    placed = [p.node for p in verdict.nodes]
    assert len(set(placed)) == len(placed) >= least
    holders = [name for name in placed if current is not None and current.at(name) is not None]
    assert len(placed) - limits.max_nodes <= len(holders), "more than max only to hand over"
    for p in verdict.nodes:
        there = job_view.members[p.node]
        assert there.id == (p.node, p.incarnation)
        assert there.id not in dead
        assert p.slots
        assert len(set(p.slots)) == len(p.slots)
        old = current.node_of(*there.id) if current else None
        # The record of a node that steps, with no slot ready, is from before: etcd is slow.
        stale = old is not None and steps_advance and not there.record.ready
        assert set(p.slots) <= set(old.slots if stale and old else there.record.ready)
    if current is not None and [len(p.slots) for p in verdict.nodes] == [len(p.slots) for p in current.nodes]:
        changed = [(old, new) for old, new in zip(current.nodes, verdict.nodes, strict=True) if old.slots != new.slots]
        assert all(set(old.slots) != set(new.slots) for old, new in changed), "no worker changes its rank"
        moved = [new.node for old, new in zip(current.nodes, verdict.nodes, strict=True) if old.node != new.node]
        assert all(current.at(node) is None for node in moved), "no node changes its rank"


@given(job_view=job_views(), current=generations, dead=st.frozensets(st.just(("a", "a.1")), max_size=1))
def test_the_leader_lives_and_is_of_the_generation_if_anyone_is(
    job_view: JobView, current: GenerationRecord, dead: Dead
) -> None:
    chief = leader(job_view, dead, current)
    alive = living(job_view, dead)
    assert (chief is None) == (not alive)
    if chief is not None:
        assert chief in alive
        inside = [p.node for p in current.nodes if p.node in alive and alive[p.node].id == (p.node, p.incarnation)]
        assert not inside or chief in inside


def test_a_node_with_another_script_takes_no_part_and_is_named() -> None:
    """At the start the oldest node's counts; later that of the nodes with a place, however young."""

    def runs(code: str, node: str, revision: int, **more: object) -> Member:
        plain = member(node, revision, **more)  # type: ignore[arg-type]
        return dataclasses.replace(plain, record=msgspec.structs.replace(plain.record, code=code))

    both = NodeLimits(min_nodes=2, max_nodes=3, join_wait_s=5.0)
    wait = waits(decide(view(runs("1", "a", 1), runs("2", "b", 2)), None, limits=both))
    assert reason(Code.OTHER_SCRIPT, node="b", other="a") in wait.reason.because
    assert nodes(
        decide(view(runs("1", "a", 1), runs("2", "b", 2), runs("1", "c", 3)), None, limits=both, reached_s=9)
    ) == [
        "a",
        "c",
    ]
    young = view(runs("2", "d", 1), runs("1", "b", 2), runs("1", "c", 3))
    lost = msgspec.structs.replace(ABC, nodes=ABC.nodes)
    assert nodes(decide(young, lost)) == ["b", "c"]
    anew = view(runs("2", "a", 5, worker_id=2), runs("1", "b", 2), runs("1", "c", 3))
    assert nodes(decide(anew, ABC)) == ["b", "c"]
    unknown = view(runs("", "a", 1), runs("1", "b", 2), runs("", "c", 3))
    assert waits(decide(unknown, ABC, steps_advance=True)).steady
