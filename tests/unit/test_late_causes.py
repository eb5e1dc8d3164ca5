"""What is reported of a failure after the job has recovered from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from support.jobs import changed, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.origin import Origin
from elastic.contract.records.job_records import BrokenRecord, Cause, GenerationNode, IncidentRecord, Loss
from elastic.recovery.facts.incident import Closed, Incident, Sync, causes, merged_record
from elastic.recovery.machine.effects import AddCauses
from elastic.recovery.machine.events import Viewed
from elastic.recovery.machine.model import Agent
from elastic.recovery.recovery import step

FAILED, FORMED = (generation(n, [place("a", 0), place("b", 0)]) for n in (1, 2))
COLLECTIVE = BrokenRecord(generation=1, node="a", kind="comm", detail="connection closed by peer", step=20)
DEATH = BrokenRecord(generation=1, node="b", kind="exit", detail="killed by SIGKILL", slots=(0,), ranks=(1,), step=20)


def over(*syncs: Sync) -> Closed:
    incident = Incident(key=2, generations=(FAILED, FORMED), began_s=0.0, reports=(COLLECTIVE,), syncs=syncs)
    return Closed(incident, FORMED, recovered=True, counted=True, witnessed=True)


LIVE = Sync(generation=2, resumed=20, reached=20, origin=Origin.LIVE, source="live")


def test_a_death_that_is_reported_late_is_the_cause() -> None:
    before = over(LIVE)
    assert (before.record().kind, before.record().ranks) == ("comm", ())
    fuller = merged_record(before.record(), before.with_report(DEATH).record())
    assert (fuller.kind, fuller.node, fuller.ranks, fuller.detail) == ("exit", "b", (1,), "killed by SIGKILL")
    assert [c.kind for c in fuller.causes] == ["exit"], "the failed collective was its consequence"
    assert (fuller.steps_lost, fuller.steps_lost_at_most) == (0, 0)


LOST = Cause(generation=1, node="a", kind="lost", ranks=(0,), detail="node a is gone: its agent's lease has run out")


@pytest.mark.parametrize(
    ("after", "reports", "named"),
    [
        ([place("a"), place("b")], (DEATH,), ["b"]),  # the job goes on with the same agent of node a
        ([place("a", worker_id=2), place("b")], (DEATH,), ["a", "b"]),
        ([place("b")], (DEATH,), ["a", "b"]),
        ([place("a"), place("b")], (replace_struct(COLLECTIVE, node="b"),), ["a"]),  # nothing else explains the failure
    ],
)
def test_a_living_node_that_an_earlier_leader_took_for_lost_is_not_named_beside_the_cause(
    after: list[GenerationNode], reports: tuple[BrokenRecord, ...], named: list[str]
) -> None:
    """Perhaps by the node itself, which leads now."""
    record = IncidentRecord(generation=2, kind="lost", node="a", ranks=(0,), detail="", wall_s=1.0, causes=(LOST,))
    incident = Incident(key=2, generations=(FAILED, generation(2, after)), began_s=0.0, reports=reports)
    continued = incident.with_recorded(2, record)
    assert continued.with_recorded(2, record) == continued
    assert [cause.node for cause in causes(continued) if cause.kind != "comm"] == named


def test_the_cause_of_an_earlier_generation_stays_when_a_later_one_has_a_cause_too() -> None:
    """Node b answers again and keeps its place; the recovery from its silence is cut short by the death of a worker."""
    silent = Cause(generation=1, node="b", kind="unreachable", ranks=(1,), detail="b cannot be reached by a")
    record = IncidentRecord(generation=2, kind="unreachable", node="b", ranks=(1,), detail="", wall_s=1.0,
                            causes=(silent,))  # fmt: skip
    death = replace_struct(DEATH, generation=2, node="a", ranks=(0,))
    incident = Incident(
        key=2, generations=(FAILED, FORMED, generation(3, [place("a", worker_id=2), place("b")])), began_s=0.0,
        reports=(COLLECTIVE, death),
    ).with_recorded(2, record)  # fmt: skip
    named = [(cause.generation, cause.node, cause.kind) for cause in causes(incident)]
    assert named == [(1, "b", "unreachable"), (1, "a", "comm"), (2, "a", "exit")]
    told = incident.with_report(replace_struct(DEATH, node="a", ranks=(0,)))
    assert [cause.kind for cause in causes(told)] == ["exit", "exit"], "the death explains the first failure as well"


def test_late_report_adds_repeated_steps_to_the_lost_steps() -> None:
    further = BrokenRecord(generation=1, node="b", kind="exit", detail="x", slots=(0,), ranks=(1,), step=23)
    before = over(LIVE)
    fuller = merged_record(before.record(), before.with_report(further).record())
    assert (fuller.steps_lost, fuller.step) == (3, 23)
    loss = Loss(node="b", kind="exit", detail="", step=22, slots=(0,))
    beside = BrokenRecord(generation=1, node="a", kind="comm", detail="", also=(loss,))
    assert over(LIVE).with_report(beside).record().steps_lost == 2


@pytest.mark.parametrize(("resumed", "lost"), [(15, 5), (20, 0), (23, 0)])
@pytest.mark.parametrize(("origin", "older"), [(Origin.CHECKPOINT, False), (Origin.LIVE, True)])
def test_steps_beyond_the_state_that_a_second_try_finds_are_lost_though_a_first_one_began_anew(
    origin: Origin, older: bool, resumed: int, lost: int
) -> None:
    """The ranks of the second try know of no newer step than that of setup, in the generation of the first."""
    anew = Sync(generation=2, resumed=0, reached=20, origin=Origin.SETUP, source="setup")
    found = Sync(generation=3, resumed=resumed, reached=0, origin=origin, source="", older=older)
    told = over(anew, found).record()
    assert (told.steps_lost, told.steps_lost_at_most) == (lost, 20)
    assert told.origin is origin
    assert over(anew, replace_struct(found, origin=Origin.LIVE, older=False)).record().steps_lost == 20


@pytest.mark.parametrize(("step_in", "lost"), [(0, 3), (6, 3), (5, 3), (4, 0)])
def test_a_step_of_a_generation_before_the_one_that_failed_is_not_lost_again(step_in: int, lost: int) -> None:
    """It was given up, and counted, in an earlier incident. 0: an agent of an earlier version does not say."""
    failed, formed = (generation(n, [place("a", 0), place("b", 0)]) for n in (5, 6))
    report = replace_struct(DEATH, generation=5, step=23, step_in=step_in)
    beside = BrokenRecord(generation=5, node="a", kind="comm", detail="", also=(
        Loss(node="b", kind="exit", detail="x", step=23, step_in=step_in, slots=(0,)),
    ))  # fmt: skip
    for said in (report, beside):
        incident = Incident(
            key=6, generations=(failed, formed), began_s=0.0, reports=(said,),
            syncs=(replace_struct(LIVE, generation=6),),
        )  # fmt: skip
        told = Closed(incident, formed, recovered=True, counted=True, witnessed=True).record()
        assert (told.steps_lost, told.steps_lost_at_most) == (lost, lost)


def test_the_exit_of_an_earlier_worker_says_nothing_of_the_one_that_replaced_it() -> None:
    """Node b goes on without being in the last generation: its new worker may have committed one step more."""
    last = generation(3, [place("a", 0)])
    exit_of_a = BrokenRecord(generation=2, node="a", kind="exit", detail="x", slots=(0,), ranks=(0,), step=20)
    incident = Incident(
        key=2, generations=(FAILED, FORMED, last), began_s=0.0, reports=(DEATH, exit_of_a),
        syncs=(LIVE, replace_struct(LIVE, generation=3)),
    )  # fmt: skip
    told = Closed(incident, last, recovered=True, counted=True, witnessed=True)
    assert (told.record().steps_lost, told.record().steps_lost_at_most) == (0, 1)
    exit_of_b = replace_struct(DEATH, generation=2)
    assert told.with_report(exit_of_b).record().steps_lost_at_most == 0


def test_a_failure_of_the_generation_that_has_recovered_is_another_incident() -> None:
    closed = over(LIVE)
    assert closed.with_report(BrokenRecord(generation=2, node="b", kind="exit", detail="x", slots=(0,))) is closed


def test_a_consequence_that_is_reported_late_adds_nothing() -> None:
    told = over(LIVE).with_report(DEATH)
    assert told.with_report(BrokenRecord(generation=1, node="b", kind="comm", detail="timeout")) is told


@pytest.mark.parametrize("lost", [0, None])
def test_a_record_that_names_fewer_causes_or_losses_changes_nothing_that_is_known(lost: int | None) -> None:
    known = over(LIVE).with_report(DEATH).record()
    assert merged_record(known, over(LIVE).record()) is known
    assert merged_record(known, known) is known
    less = IncidentRecord(generation=2, kind="comm", node="a", ranks=(), detail="", wall_s=5.0, ended_wall_s=6.0,
                          causes=(), steps_lost=4, steps_lost_at_most=4, step=24)  # fmt: skip
    more = IncidentRecord(generation=2, kind="exit", node="b", ranks=(1,), detail="x", wall_s=0.0,
                          causes=known.causes, steps_lost=lost, step=20)  # fmt: skip
    fuller = merged_record(less, more)
    assert (fuller.kind, fuller.wall_s, fuller.ended_wall_s) == ("exit", 5.0, 6.0)
    assert (fuller.steps_lost, fuller.steps_lost_at_most, fuller.step) == (4, 4, 24)


SPEC = JobSpec(name="job", script="train.py", nodes="1:2")
POLICY = policy(spec=SPEC)


def test_a_newer_incident_keeps_the_hand_over_that_was_seen_before_its_record() -> None:
    """Of the first recovery, and of the failure in between, this agent has seen nothing: it was cut off from etcd."""
    one, two, three = (generation(n, [place("a", 0), place("b", 0)]) for n in (1, 2, 3))
    members = [member(node, create_revision, ready=(0,)) for create_revision, node in enumerate(("a", "b"), 1)]
    sync = Sync(generation=3, resumed=25, reached=25, origin=Origin.LIVE, source="live")
    early = replace_struct(sync, generation=2)
    incident = Incident(
        key=2, generations=(one, two, three), began_s=90.0, reports=(DEATH,), syncs=(early, sync),
        gone=(Cause(generation=1, node="b", kind="lost"),),
    )  # fmt: skip
    agent = changed(Agent(POLICY), generation=three, incident=incident, broken=2)
    cause = Cause(generation=2, node="b", kind="exit", ranks=(1,), detail="exit code 1")
    record = IncidentRecord(
        generation=3, kind="exit", node="b", ranks=(1,), detail="exit code 1", wall_s=5.0, open=True, causes=(cause,)
    )
    seen = replace(view(*members, spec=SPEC, formed=three), incident=(3, record))
    agent, _ = step(agent, Viewed(seen, True), 100.0)
    kept = agent.incidents.incident
    assert kept is not None
    assert (kept.key, kept.syncs) == (3, (sync,))
    assert causes(kept) == (cause,), "and none of the failure before it"


def test_a_death_is_added_to_an_incident_that_is_closed_only_after_the_agent_has_learnt_of_the_next_one() -> None:
    """The leader of the first recovery was lost before it had closed the record; its successor closes it late."""
    one, two, three = (generation(n, [place("b", 0), place("a", 0)]) for n in (1, 2, 3))
    members = [member(node, create_revision, ready=(0,)) for create_revision, node in enumerate(("b", "a"), 1)]
    death = replace_struct(DEATH, node="a")
    incident = Incident(key=2, generations=(one, two), began_s=90.0, reports=(death,))
    agent = changed(Agent(POLICY), generation=two, incident=incident, broken=1)
    cause = Cause(generation=2, node="b", kind="exit", ranks=(0,), detail="exit code 1")
    opened = IncidentRecord(
        generation=3, kind="exit", node="b", ranks=(0,), detail="exit code 1", wall_s=5.0, open=True, causes=(cause,)
    )
    seen = replace(view(*members, spec=SPEC, formed=three), incident=(3, opened))
    agent, effects = step(agent, Viewed(seen, True), 100.0)
    assert not [e for e in effects if isinstance(e, AddCauses)], "the record is still open"
    closed = replace_struct(over(LIVE).record(), wall_s=1.0, ended_wall_s=2.0)
    agent, effects = step(agent, Viewed(replace(seen, ended={2: closed}), True), 101.0)
    (added,) = (e for e in effects if isinstance(e, AddCauses))
    assert added.key == 2
    assert [(c.generation, c.node, c.kind) for c in added.record.causes] == [(1, "a", "exit"), (1, "a", "comm")]
    agent, effects = step(agent, Viewed(replace(seen, ended={2: closed}), True), 102.0)
    assert not [e for e in effects if isinstance(e, AddCauses)], "once"


@pytest.mark.parametrize("leader", ["a", "b"])
def test_late_report_is_written_by_the_leader(leader: str) -> None:
    first, second = ("a", "b") if leader == "a" else ("b", "a")
    formed = generation(2, [place(first, 0), place(second, 0)])
    members = [member(node, create_revision, ready=(0,)) for create_revision, node in enumerate((first, second), 1)]
    agent = changed(Agent(POLICY), generation=formed, closed=over(LIVE), settled=2, reported=2)
    seen = view(*members, spec=SPEC, formed=formed)
    agent, effects = step(agent, Viewed(replace(seen, broken_before=(COLLECTIVE,)), True), 100.0)
    assert not [e for e in effects if isinstance(e, AddCauses)], "that is known"
    agent, effects = step(agent, Viewed(replace(seen, broken_before=(DEATH,)), True), 100.1)
    asked = [(e.key, e.record.kind, e.record.node) for e in effects if isinstance(e, AddCauses)]
    assert asked == ([(2, "exit", "b")] if leader == "a" else [])
    agent, effects = step(agent, Viewed(replace(seen, broken_before=(DEATH,)), True), 100.2)
    assert not [e for e in effects if isinstance(e, AddCauses)], "once"
