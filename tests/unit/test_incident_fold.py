"""Incidents, made from what agents have written of them: whoever was lost, and in whatever order it was written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.jobs import generation, place

from elastic.contract.origin import Origin
from elastic.contract.records.incident_account import IncidentAccount, Outcome, Sync
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import (
    BrokenRecord,
    Cause,
    GenerationNode,
    GenerationRecord,
    IncidentRecord,
    Loss,
)
from elastic.recovery.facts.evidence import merged
from elastic.recovery.facts.incident import AccountFacts, Incident, account

FAILED, FORMED = (generation(n, [place("a", 0), place("b", 0)]) for n in (1, 2))
COLLECTIVE = BrokenRecord(generation=1, node="a", kind="comm", detail="connection closed by peer", step=20)
DEATH = BrokenRecord(generation=1, node="b", kind="exit", detail="killed by SIGKILL", slots=(0,), ranks=(1,), step=20)
LIVE = Sync(generation=2, resumed=20, reached=20, origin=Origin.LIVE, source="live")


def gone(generation: int, node: str, rank: int, kind: str = "lost") -> Cause:
    return Cause(generation=generation, node=node, kind=kind, ranks=(rank,), detail=f"node {node} is gone")


LOST = gone(1, "a", 0)


def tells(
    outcome: Outcome = Outcome.STEPPING,
    *,
    of: tuple[GenerationRecord, ...] = (FAILED, FORMED),
    node: str = "a",
    **seen: Any,
) -> IncidentAccount:
    """The account of the agent of `node` that has seen the generations `of`."""
    given = {
        "reached": (of[0].number, 20),
        "noticed_wall_s": 100.0,
        "timeline_s": ((str(outcome), 2.0),) if outcome else (),
    } | seen
    incident = Incident(first=of[0].number, generations=of, began_s=0.0, **given)
    on_at = given["reached"][0], given["reached"][1] + 1
    return account(AccountFacts(incident, of[-1], outcome, on_at, True), node=node, by=f"{node}.1")


def folded(*reports: BrokenRecord, accounts: tuple[IncidentAccount, ...] = ()) -> IncidentRecord:
    (found,) = incidents(accounts or (tells(syncs=(LIVE,)),), reports)
    return found


def begun(*, of: tuple[GenerationRecord, ...] = (FAILED,), node: str = "b", **seen: Any) -> IncidentAccount:
    return tells(Outcome.OPEN, of=of, node=node, **seen)


# ── causes ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_death_that_is_reported_late_is_the_cause() -> None:
    before, fuller = folded(COLLECTIVE), folded(merged(COLLECTIVE, DEATH))
    assert (before.kind, before.ranks) == ("comm", ())
    assert (fuller.kind, fuller.node, fuller.ranks, fuller.detail) == ("exit", "b", (1,), "killed by SIGKILL")
    assert [c.kind for c in fuller.causes] == ["exit"], "the failed collective was its consequence"
    assert (fuller.steps_lost, fuller.steps_lost_at_most) == (0, 0)
    assert (fuller.wall_s, fuller.ended_wall_s) == (before.wall_s, before.ended_wall_s)


def test_a_consequence_that_is_reported_late_adds_nothing() -> None:
    assert folded(merged(DEATH, replace(COLLECTIVE, node="b"))) == folded(DEATH)


@pytest.mark.parametrize(
    ("after", "report", "named"),
    [
        ([place("a"), place("b")], DEATH, ["b"]),  # the job goes on with the same agent of node a
        ([place("a", worker_id=2), place("b")], DEATH, ["a", "b"]),
        ([place("b")], DEATH, ["a", "b"]),
        ([place("a"), place("b")], replace(COLLECTIVE, node="b"), ["a"]),  # nothing else explains the failure
    ],
)
def test_a_living_node_that_an_earlier_leader_took_for_lost_is_not_named_beside_the_cause(
    after: list[GenerationNode], report: BrokenRecord, named: list[str]
) -> None:
    """Perhaps by the node itself, which leads now."""
    found = folded(report, accounts=(begun(gone=(LOST,)), tells(of=(FAILED, generation(2, after)))))
    assert [cause.node for cause in found.causes if cause.kind != "comm"] == named


def test_the_cause_of_an_earlier_generation_stays_when_a_later_one_has_a_cause_too() -> None:
    """Node b answers again and keeps its place; the recovery from its silence is cut short by the death of a worker."""
    silent = gone(1, "b", 1, "unreachable")
    death = replace(DEATH, generation=2, node="a", ranks=(0,))
    both = (
        begun(gone=(silent,)),
        tells(of=(FAILED, FORMED, generation(3, [place("a", worker_id=2), place("b")]))),
    )
    named = [(cause.generation, cause.node, cause.kind) for cause in folded(COLLECTIVE, death, accounts=both).causes]
    assert named == [(1, "b", "unreachable"), (1, "a", "comm"), (2, "a", "exit")]
    explained = merged(COLLECTIVE, replace(DEATH, node="a", ranks=(0,)))
    kinds = [cause.kind for cause in folded(explained, death, accounts=both).causes]
    assert kinds == ["exit", "exit"], "the death explains the first failure as well"


def test_what_only_a_leader_that_is_lost_has_learnt_stays() -> None:
    three = generation(1, [place(node, 0) for node in "abc"])
    both = (
        begun(gone=(gone(1, "c", 2),)),
        tells(of=(three, generation(2, [place("a", 0)])), gone=(gone(1, "b", 1),)),
    )
    found = folded(accounts=both)
    assert {cause.node for cause in found.causes} == {"b", "c"}


def test_a_failure_of_the_generation_that_has_recovered_is_another_incident() -> None:
    later = replace(DEATH, generation=2, node="a", ranks=(0,))
    third = generation(3, [place("a", 0, worker_id=2), place("b", 0)])
    first, second = incidents((tells(), tells(of=(FORMED, third))), (DEATH, later))
    assert [(c.generation, c.node) for c in first.causes] == [(1, "b")]
    assert [(c.generation, c.node) for c in second.causes] == [(2, "a")]
    assert folded(DEATH, later).causes == first.causes, "nobody has told of the second one yet"


# ── what belongs together ───────────────────────────────────────────────────────────────────────────────────


def test_a_recovery_that_the_leader_did_not_see_the_end_of_has_ended_where_another_agent_saw_it_step() -> None:
    """b led, and has failed before it had stepped: it takes the two failures for one."""
    third = generation(3, [place("a", 0)])
    lost = gone(2, "b", 1)
    opened, first, second = begun(), tells(), tells(of=(FORMED, third), gone=(lost,), noticed_wall_s=110.0)
    found = incidents((replace(opened, gone=(gone(1, "b", 1), lost)), first, second))
    assert [(i.generation, i.open, [c.generation for c in i.causes]) for i in found] == [
        (2, False, [1]),
        (3, False, [2]),
    ]
    assert [i.wall_s for i in found] == [100.0, 110.0]


def test_an_incident_of_which_no_account_tells_the_end_has_ended_where_the_next_one_begins() -> None:
    """The next leader knows that generation 2 had stepped when that failed."""
    third = generation(3, [place("a", 0, worker_id=2)])
    second = tells(
        of=(FORMED, third),
        stepped_in=2,
        noticed_wall_s=110.0,
        gone=(gone(2, "b", 1),),
    )
    first, _ = incidents((begun(), second))
    assert (first.open, first.generation, first.ended_wall_s, first.world_size_after) == (False, 2, 110.0, 2)
    assert first.timeline_s == {"stepping": 10.0}
    assert (first.steps_lost, first.origin) == (None, None)


def test_each_incident_has_an_id_and_those_of_one_generation_are_counted() -> None:
    """It stands still three times, steps on, and fails."""
    alarms = [tells(of=(FAILED,), reached=(1, 10 * n), gone=(LOST,), repeat=n) for n in range(3)]
    found = incidents((*alarms, tells(reached=(1, 40), repeat=3)), (DEATH,))
    assert [(i.repeat, i.generation, i.open) for i in found] == [
        (0, 1, False),
        (1, 1, False),
        (2, 1, False),
        (3, 2, False),
    ]
    assert [[c.kind for c in i.causes] for i in found] == [["lost"]] * 3 + [["exit"]]
    assert len({i.id for i in found}) == 4
    assert found[0].id == incidents(alarms[:1])[0].id


def test_the_accounts_of_two_leaders_of_one_false_alarm_are_of_one_incident() -> None:
    """The first one was cut off, with its account open; the next one saw the generation step on."""
    opened = begun(reached=(1, 11), gone=(LOST,))
    alarm, again = (
        tells(of=(FAILED,), reached=(1, 10), gone=(LOST,)),
        tells(of=(FAILED,), reached=(1, 11), gone=(LOST,), node="b"),
    )
    (found,) = incidents((opened, alarm, again))
    assert (found.repeat, found.open, found.generation, [c.node for c in found.causes]) == (0, False, 1, ["a"])
    next_one = begun(reached=(1, 30), repeat=1)
    assert [i.open for i in incidents((opened, alarm, again, next_one))] == [False, True]


# ── from when to when ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("off_s", [-400.0, 400.0])
def test_an_incident_begins_by_the_clock_of_the_agent_that_told_of_it_first(off_s: float) -> None:
    opened = begun(noticed_wall_s=100.0 + off_s)
    found = folded(accounts=(opened, tells(noticed_wall_s=103.0, stepped_s=-4.0)))
    assert found.wall_s == 100.0 + off_s
    late_s = 4.0 if off_s < 0 else 0.0  # no longer than that agent had seen no step
    assert found.ended_wall_s == found.wall_s + late_s + 2.0


def test_an_incident_is_open_until_an_account_shows_the_end() -> None:
    (found,) = incidents((begun(gone=(LOST,)),))
    assert (found.open, found.kind, found.node, found.ended_wall_s, found.steps_lost) == (True, "lost", "a", None, None)
    (given_up,) = incidents((begun(gone=(LOST,)), tells(Outcome.GIVEN_UP)))
    assert (given_up.open, given_up.origin, given_up.world_size_after) == (False, Origin.NOTHING, 0)


# ── lost steps ──────────────────────────────────────────────────────────────────────────────────────────────


def test_late_report_adds_repeated_steps_to_the_lost_steps() -> None:
    fuller = folded(merged(COLLECTIVE, replace(DEATH, detail="x", step=23)))
    assert (fuller.steps_lost, fuller.step) == (3, 23)
    loss = Loss(node="b", kind="exit", detail="", step=22, slots=(0,))
    assert folded(BrokenRecord(generation=1, node="a", kind="comm", detail="", also=(loss,))).steps_lost == 2


@pytest.mark.parametrize(("resumed", "lost"), [(15, 5), (20, 0), (23, 0)])
@pytest.mark.parametrize(("origin", "older"), [(Origin.CHECKPOINT, False), (Origin.LIVE, True)])
def test_steps_beyond_the_state_that_a_second_try_finds_are_lost_though_a_first_one_began_anew(
    origin: Origin, older: bool, resumed: int, lost: int
) -> None:
    """The ranks of the second try know of no newer step than that of setup, in the generation of the first."""
    anew = Sync(generation=2, resumed=0, reached=20, origin=Origin.SETUP, source="setup")
    found = Sync(generation=3, resumed=resumed, reached=0, origin=origin, source="", older=older)
    third = generation(3, [place("a", 0), place("b", 0)])

    def after(*syncs: Sync) -> IncidentRecord:
        return folded(COLLECTIVE, accounts=(tells(of=(FAILED, FORMED, third), syncs=syncs),))

    record = after(anew, found)
    assert (record.steps_lost, record.steps_lost_at_most) == (lost, 20)
    assert record.origin is origin
    assert after(anew, replace(found, origin=Origin.LIVE, older=False)).steps_lost == 20


@pytest.mark.parametrize(("step_in", "lost"), [(0, 3), (6, 3), (5, 3), (4, 0)])
def test_a_step_of_a_generation_before_the_one_that_failed_is_not_lost_again(step_in: int, lost: int) -> None:
    """It was given up, and counted, in an earlier incident. 0: an agent of an earlier version does not say."""
    both = tuple(generation(n, [place("a", 0), place("b", 0)]) for n in (5, 6))
    report = replace(DEATH, generation=5, step=23, step_in=step_in)
    beside = BrokenRecord(generation=5, node="a", kind="comm", detail="", also=(
        Loss(node="b", kind="exit", detail="x", step=23, step_in=step_in, slots=(0,)),
    ))  # fmt: skip
    for said in (report, beside):
        record = folded(said, accounts=(tells(of=both, syncs=(replace(LIVE, generation=6),)),))
        assert (record.steps_lost, record.steps_lost_at_most) == (lost, lost)


def test_the_exit_of_an_earlier_worker_says_nothing_of_the_one_that_replaced_it() -> None:
    """Node b goes on without being in the last generation: its new worker may have committed one step more."""
    last = generation(3, [place("a", 0)])
    exit_of_a = BrokenRecord(generation=2, node="a", kind="exit", detail="x", slots=(0,), ranks=(0,), step=20)
    accounts = (tells(of=(FAILED, FORMED, last), syncs=(LIVE, replace(LIVE, generation=3))),)
    record = folded(DEATH, exit_of_a, accounts=accounts)
    assert (record.steps_lost, record.steps_lost_at_most) == (0, 1)
    known = folded(DEATH, merged(exit_of_a, replace(DEATH, generation=2)), accounts=accounts)
    assert known.steps_lost_at_most == 0


def test_an_agent_that_joined_after_the_failure_does_not_say_how_many_steps_are_lost() -> None:
    newcomer = generation(2, [place("a", 0), place("c", 0)])
    assert folded(DEATH, accounts=(tells(of=(FAILED, newcomer), node="c", syncs=(LIVE,)),)).steps_lost is None


# ── whatever is written ─────────────────────────────────────────────────────────────────────────────────────

NUMBERS, STEPS = st.integers(1, 6), st.integers(-3, 30)
REACHED = st.tuples(NUMBERS, STEPS)
GONE = st.builds(gone, NUMBERS, st.sampled_from("abc"), st.just(0), st.sampled_from(["lost", "unreachable", "comm"]))
SYNCS = st.builds(Sync, NUMBERS, STEPS, STEPS, st.sampled_from(Origin), st.just(""))
ACCOUNTS = st.builds(
    IncidentAccount, first=NUMBERS, last=NUMBERS, outcome=st.sampled_from(Outcome), stepped_in=NUMBERS,
    reached=REACHED, stepped_on_at=REACHED, by=st.sampled_from("ab"), planned=st.booleans(),
    gone=st.lists(GONE, max_size=2).map(tuple),
    syncs=st.lists(SYNCS, max_size=2).map(tuple), witnessed=st.booleans(), noticed_wall_s=st.floats(-1e9, 1e9),
)  # fmt: skip
REPORTS = st.builds(
    BrokenRecord, generation=NUMBERS, node=st.sampled_from("abc"), kind=st.sampled_from(["exit", "comm"]),
    detail=st.just(""), slots=st.just((0,)), step=STEPS, step_in=NUMBERS,
)  # fmt: skip


@given(st.lists(ACCOUNTS, max_size=4), st.lists(REPORTS, max_size=3))
def test_whatever_is_written_each_account_is_of_some_incident_and_none_is_told_twice(
    accounts: list[IncidentAccount], reports: list[BrokenRecord]
) -> None:
    """A job's user can write any."""
    found = incidents(accounts, reports)
    assert len({incident.id for incident in found}) == len(found)
    assert bool(found) == any(account.first <= account.last for account in accounts)
    assert all(incident.ended_wall_s is not None and not incident.open for incident in found[:-1])
    for one, other in itertools.combinations(found, 2):
        exits = [{c for c in each.causes if c.kind == "exit"} for each in (one, other)]
        assert not exits[0] & exits[1]
    assert incidents([*accounts, *accounts], reports) == found, "what is told twice changes nothing"
