"""Several incidents of one generation: it stood still, stepped on, and stood still or failed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from support.fake_etcd import FakeServer
from support.jobs import broken, changed, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.origin import Origin
from elastic.contract.records.job_records import BrokenRecord, Cause, GenerationRecord, IncidentRecord, Phase, encode
from elastic.etcd.client import Put
from elastic.recovery.facts.incident import KEPT_REPEATS, Closed, Incident, merged_record
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import AddCauses, PutIncident, PutState
from elastic.recovery.machine.events import Viewed
from elastic.recovery.machine.model import Agent
from elastic.recovery.recovery import step

KEYS = ClusterKeys("c").job("job")
FORMED = generation(1, [place("a", 0), place("b", 0)])
OPEN = IncidentRecord(generation=2, kind="lost", node="b", ranks=(1,), detail="", wall_s=1.0, open=True)
OVER = replace_struct(OPEN, open=False, generation=1, ended_wall_s=2.0)
"""A false alarm: generation 1 stepped on."""
FAILED = replace_struct(OVER, generation=2)


def seen(*records: IncidentRecord) -> JobView:
    server = FakeServer()
    puts = [Put(KEYS.incident(2, repeat), encode(record)) for repeat, record in enumerate(records)]
    server.put_all([Put(KEYS.generation, encode(FORMED)), *puts])
    return JobView.read(KEYS, server.kvs, server.revision)


def again(record: IncidentRecord, repeat: int) -> IncidentRecord:
    return replace_struct(record, repeat=repeat)


def test_each_incident_of_a_generation_has_a_key_of_its_own() -> None:
    assert len({KEYS.incident(2, repeat) for repeat in range(30)} | {KEYS.incident(3)}) == 31
    assert all(KEYS.incident(2, repeat).startswith(KEYS.incidents) for repeat in range(30))


@pytest.mark.parametrize(
    ("records", "repeats", "is_open"),
    [
        ((), {}, False),
        ((OPEN,), {2: 0}, True),
        ((OVER,), {2: 1}, False),
        ((FAILED,), {2: 0}, False),
        ((OVER, again(OPEN, 1)), {2: 1}, True),
        ((OVER, again(OVER, 1), again(OVER, 2)), {2: 3}, False),
        ((OVER, again(FAILED, 1)), {2: 1}, False),
    ],
)
def test_the_newest_record_of_a_generation_says_which_number_the_next_incident_has(
    records: tuple[IncidentRecord, ...], repeats: dict[int, int], is_open: bool
) -> None:
    found = seen(*records)
    assert found.repeats == repeats
    assert found.incident == ((2, records[-1]) if is_open else None)


SPEC = JobSpec(name="job", script="train.py", nodes="1:2")
MEMBERS = [member(node, create_revision, ready=(0,)) for create_revision, node in enumerate(("a", "b"), 1)]
BEGUN = Incident(key=2, generations=(FORMED,), began_s=50.0)


def written(agent: Agent, *records: IncidentRecord) -> list[tuple[int, int, bool]]:
    """(key, repeat, open) of each record that a, which leads, writes when b reports a failure of generation 1."""
    shown = seen(*records)
    failed = view(*MEMBERS, spec=SPEC, formed=FORMED, failed=broken(1, "b", 0))
    agent, effects = step(agent, Viewed(replace(failed, incident=shown.incident, repeats=shown.repeats), True), 100.0)
    return [(e.key, e.record.repeat, e.record.open) for e in effects if isinstance(e, PutIncident)]


def closed(*, written: bool) -> Agent:
    over = Closed(BEGUN, FORMED, recovered=True, counted=True, witnessed=True, written=written)
    return changed(Agent(policy(spec=SPEC)), generation=FORMED, settled=1, reported=2, closed=over)


@pytest.mark.parametrize(("records", "repeat"), [((), 0), ((OPEN,), 0), ((OVER,), 1), ((OVER, again(OVER, 1)), 2)])
def test_a_failure_has_the_number_after_the_false_alarms(records: tuple[IncidentRecord, ...], repeat: int) -> None:
    agent = changed(Agent(policy(spec=SPEC)), generation=FORMED, settled=1)
    assert written(agent, *records) == [(2, repeat, True)]


def test_a_record_that_still_looks_open_was_closed_by_this_agent() -> None:
    """Its own write is on the way. What it did not write, as another agent led, is open."""
    assert written(closed(written=True), OPEN) == [(2, 1, True)]
    assert written(closed(written=False), OPEN) == [(2, 0, True)]
    assert written(closed(written=True)) == [(2, 0, True)], "etcd has lost the record"


def test_a_recovery_that_the_leader_did_not_see_the_end_of_is_closed_by_the_next_leader() -> None:
    """Generation 2 has stepped here, and not on b, which led and has failed: its record of the first one is open."""
    second = generation(2, [place("b", 0), place("a", 0)])
    over = Closed(BEGUN, second, recovered=True, counted=True, witnessed=True, written=False)
    agent = changed(Agent(policy(spec=SPEC)), generation=second, settled=2, reported=2, closed=over)
    third = generation(3, [place("a", 0), place("b", 0)])
    agent, before = step(agent, Viewed(view(*MEMBERS, spec=SPEC, formed=second, failed=broken(2, "b", 0)), True), 99.0)
    assert not [effect for effect in before if isinstance(effect, PutIncident)]
    only_b = Cause(generation=1, node="b", kind="exit", ranks=(1,), detail="only b knew")
    its_own = replace_struct(only_b, generation=2, detail="killed by SIGKILL")
    opened = replace_struct(OPEN, causes=(only_b, its_own))
    now = replace(view(*MEMBERS, spec=SPEC, formed=third), incident=(2, opened), repeats={2: 0})
    puts: list[PutIncident] = []
    for _ in range(2):  # its writes are on their way
        agent, effects = step(agent, Viewed(now, True), 100.0)
        puts += [e for e in effects if isinstance(e, PutIncident)]
    written = [(e.key, e.record.open) for e in puts]
    assert written == [(2, False), (3, True)]
    assert only_b in puts[0].record.causes
    assert its_own not in puts[0].record.causes, "of the incident after it"


def test_a_record_that_waited_for_a_leader_is_not_written_over_what_only_the_former_leader_knew() -> None:
    second = generation(2, [place("a", 0), place("b", 0)])
    over = Closed(BEGUN, second, recovered=True, counted=True, witnessed=True, written=False)
    agent = changed(
        Agent(policy(spec=SPEC)), generation=second, settled=2, reported=2, closed=over,
        unwritten=PutIncident(2, over.record()),
    )  # fmt: skip
    only_b = Cause(generation=1, node="b", kind="exit", ranks=(1,), detail="only b knew")
    opened = replace_struct(OPEN, causes=(only_b,))
    now = replace(view(*MEMBERS, spec=SPEC, formed=second), incident=(2, opened), repeats={2: 0})
    _, effects = step(agent, Viewed(now, True), 100.0)
    assert [only_b in e.record.causes for e in effects if isinstance(e, PutIncident)] == [True]


def test_a_new_leader_writes_the_end_of_the_job_after_the_record_that_waited_for_it() -> None:
    """A script that waits for the phase of a job reads its incidents next."""
    second = generation(2, [place("a", 0), place("b", 0)])
    over = Closed(BEGUN, second, recovered=True, counted=True, witnessed=True, written=False)
    agent = changed(
        Agent(policy(spec=SPEC)), generation=second, settled=2, reported=2, closed=over, joined=True, connected=True,
        unwritten=PutIncident(2, over.record()),
    )  # fmt: skip
    done = [member("a", 1, ready=(0,), done=2), member("b", 2, ready=(0,), done=2)]
    now = replace(view(*done, spec=SPEC, formed=second), incident=(2, OPEN), repeats={2: 0})
    _, effects = step(agent, Viewed(now, True), 100.0)
    put = [e for e in effects if isinstance(e, PutIncident | PutState)]
    assert [type(e) for e in put] == [PutIncident, PutState]
    assert isinstance(put[-1], PutState)
    assert put[-1].state.phase is Phase.SUCCEEDED


def test_a_record_that_was_left_open_ends_where_the_incident_after_it_begins() -> None:
    """Generation 3 has failed too: that is told by the record after it, which is over."""
    formed = generation(4, [place("a", 0), place("b", 0)])
    agent = changed(Agent(policy(spec=SPEC)), generation=formed, settled=4, reported=4, stepped_at_s=100.0)
    own, later = (Cause(generation=number, node="b", kind="exit", detail="killed") for number in (1, 3))
    opened = replace_struct(OPEN, causes=(own, later))
    after = replace_struct(FAILED, generation=4, causes=(later,), wall_s=11.0, ended_wall_s=12.0, world_size_before=1)
    now = replace(
        view(*MEMBERS, spec=SPEC, formed=formed), incident=(2, opened), repeats={2: 0, 4: 0}, ended={4: after}
    )
    _, effects = step(agent, Viewed(now, True), 100.0, wall_s=50.0)
    (told,) = (e.record for e in effects if isinstance(e, PutIncident))
    assert (told.generation, told.causes, told.ended_wall_s, told.world_size_after) == (3, (own,), 11.0, 1)
    assert told.timeline_s == {"stepping": 10.0}


def test_an_open_record_that_comes_back_with_a_backup_is_closed_with_the_end_that_it_had() -> None:
    second = generation(2, [place("a", 0), place("b", 0)])
    tracked = replace_struct(BEGUN, noticed_wall_s=1.0, timeline_s=(("stepping", 1.5),))
    over = Closed(tracked, second, recovered=True, counted=True, witnessed=True, written=True)
    known = view(*MEMBERS, spec=SPEC, formed=second)
    agent = changed(
        Agent(policy(spec=SPEC)), generation=second, settled=2, reported=2, closed=over, stepped_at_s=7200.0,
        joined=True, connected=True, view=replace(known, revision=90),
    )  # fmt: skip
    back = replace(known, incident=(2, OPEN), repeats={2: 0}, revision=40)
    _, effects = step(agent, Viewed(back, True), 7200.0, wall_s=7151.0)
    assert [(e.record.open, e.record.ended_wall_s) for e in effects if isinstance(e, PutIncident)] == [(False, 2.5)]


def late_causes(
    generations: tuple[GenerationRecord, ...], reports: tuple[BrokenRecord, ...], over: IncidentRecord
) -> IncidentRecord:
    """The record `over` of incident 2 once a, which was cut off while it tracked that one, sees that 3 has begun."""
    tracked = replace_struct(BEGUN, generations=generations, reports=reports)
    newest = generations[-1]
    agent = changed(
        Agent(policy(spec=SPEC)), generation=newest, broken=newest.number, broken_record=reports[-1], settled=1,
        incident=tracked,
    )  # fmt: skip
    third = generation(3, [place("b", 0)])
    opened = replace_struct(OPEN, generation=3, wall_s=5.0)
    shown = replace(
        view(*MEMBERS, spec=SPEC, formed=third), incident=(3, opened), repeats={2: 0, 3: 0}, ended={2: over}
    )
    _, effects = step(agent, Viewed(shown, True), 100.0)
    for effect in effects:
        over = merged_record(over, effect.record) if isinstance(effect, AddCauses) else over
    return over


def test_a_late_death_of_a_generation_that_had_stepped_is_not_added_to_the_incident_that_ended_in_it() -> None:
    """Node b has committed steps in generation 2, so its later failure is incident 3. The agent of b learns of
    incident 3 in the same view."""
    second = generation(2, [place("b", 0), place("a", 0)])
    first = Cause(generation=1, node="b", kind="exit", ranks=(0,), detail="killed")
    over = replace_struct(FAILED, kind="exit", ranks=(0,), causes=(first,))
    assert late_causes((FORMED, second), (broken(1, "b", 0), broken(2, "a", 0)), over) == over


def test_a_record_that_a_late_death_is_added_to_names_all_that_failed_together() -> None:
    formed = generation(1, [place("b", 0), place("c", 0), place("a", 0)])
    two = tuple(
        Cause(generation=1, node=node, kind="exit", ranks=(rank,), detail="killed") for rank, node in enumerate("bc")
    )
    over = replace_struct(
        FAILED, kind="exit", node="b, c", ranks=(0, 1), detail="killed", further=1, causes=two, step=9,
        origin=Origin.SETUP,
    )  # fmt: skip
    told = late_causes((formed,), (replace_struct(broken(1, "a", 0), ranks=(2,)),), over)
    assert (told.node, told.ranks) == ("b, c, a", (0, 1, 2))
    assert (told.detail, told.further, told.begun_again_at) == ("killed", 2, 9)


def test_an_incident_that_began_before_another_leader_closed_a_false_alarm_gets_the_next_number() -> None:
    """The generation has failed: it is not the false alarm."""
    tracked = replace_struct(BEGUN, told=())
    agent = changed(Agent(policy(spec=SPEC)), generation=FORMED, settled=1, incident=tracked)
    assert written(agent, OVER) == [(2, 1, True)]


def test_the_number_of_records_of_one_generation_is_limited() -> None:
    many = [again(OVER, repeat) for repeat in range(KEPT_REPEATS + 1)]
    assert written(changed(Agent(policy(spec=SPEC)), generation=FORMED, settled=1), *many) == [(2, KEPT_REPEATS, True)]
