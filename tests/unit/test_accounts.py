"""When an agent writes what it has seen of an incident: as leader, or to end what it has begun to tell; once each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from support.jobs import broken, changed, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.origin import Origin
from elastic.contract.records.incident_account import IncidentAccount, Outcome, Sync
from elastic.contract.records.job_records import Cause, Phase, ProgressRecord
from elastic.recovery.facts.incident import KEPT_REPEATS, AccountFacts, Incident, account
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import PutBroken, PutIncident, PutState
from elastic.recovery.machine.events import Tick, Viewed
from elastic.recovery.machine.model import Agent
from elastic.recovery.recovery import step

FIRST, SECOND, THIRD = (generation(number, [place("a", 0), place("b", 0)]) for number in (1, 2, 3))
LED_BY_B = generation(2, [place("b", 0), place("a", 0)])
SPEC = JobSpec(name="job", script="train.py", nodes="1:2")
A, B = member("a", 1, ready=(0,)), member("b", 2, ready=(0,))
TRACKED = Incident(first=1, generations=(FIRST,), began_s=90.0)
LAST = AccountFacts(TRACKED, SECOND, Outcome.STEPPING, (2, 7), True)
OVER = account(LAST, node="a", by="a.1")
OPEN = replace_struct(OVER, last=1, outcome=Outcome.OPEN)


def seen(*accounts: IncidentAccount, leader: str = "a", **facts: object) -> JobView:
    formed = SECOND if leader == "a" else LED_BY_B
    return replace(view(A, B, spec=SPEC, formed=formed), accounts=accounts, **facts)


def agent(**fields: object) -> Agent:
    """Of node a."""
    known = {"generation": SECOND, "settled": 2, "last": LAST, "joined": True, "connected": True}
    return changed(Agent(policy(spec=SPEC)), **known | fields)


def written(now: Agent, shown: JobView, times: int = 3) -> list[IncidentAccount]:
    found: list[IncidentAccount] = []
    for _ in range(times):  # its writes are on their way
        now, effects = step(now, Viewed(shown, True), 100.0)
        found += [effect.account for effect in effects if isinstance(effect, PutIncident)]
    return found


@pytest.mark.parametrize("begun", [False, True])
def test_the_next_leader_tells_once_how_an_incident_has_ended_if_the_one_before_did_not(begun: bool) -> None:
    shown = (OPEN,) if begun else ()
    assert written(agent(unwritten=True), seen(*shown)) == [OVER]
    assert written(agent(unwritten=True, generation=LED_BY_B), seen(*shown, leader="b")) == []


def test_the_next_leader_does_not_tell_what_is_on_record() -> None:
    assert written(agent(unwritten=True), seen(replace_struct(OVER, by="b.1"))) == []


def test_an_agent_that_has_told_of_a_beginning_tells_the_end_though_another_one_leads() -> None:
    for told, ends in (((), [Outcome.STEPPING]), (None, [])):
        incident = replace_struct(TRACKED, generations=(FIRST, LED_BY_B), told=told)
        tracked = agent(incident=incident, last=None, generation=LED_BY_B)
        assert [account.outcome for account in written(tracked, seen(leader="b"))] == ends


def test_a_new_leader_writes_the_end_of_the_job_after_the_account_that_waited_for_it() -> None:
    """A script that waits for the phase of a job reads its incidents next."""
    done = [member("a", 1, ready=(0,), done=2), member("b", 2, ready=(0,), done=2)]
    now = replace(view(*done, spec=SPEC, formed=SECOND), accounts=(OPEN,))
    _, effects = step(agent(unwritten=True), Viewed(now, True), 100.0)
    put = [effect for effect in effects if isinstance(effect, PutIncident | PutState)]
    assert [type(effect) for effect in put] == [PutIncident, PutState]
    assert isinstance(put[-1], PutState)
    assert put[-1].state.phase is Phase.SUCCEEDED


def test_an_incident_that_comes_back_open_with_a_backup_is_told_with_the_end_that_it_had() -> None:
    now = agent(view=seen(OVER, revision=90))
    assert written(now, seen(OPEN, revision=40)) == [OVER]
    assert written(now, seen(revision=40)) == [OVER], "all that was told of it is lost"


def test_reports_that_etcd_has_lost_are_written_again_when_the_incident_is_over() -> None:
    report = broken(1, "b", 0)
    tracked = agent(incident=replace_struct(TRACKED, generations=(FIRST, SECOND), reports=(report,)), last=None)
    for shown, again in ((seen(), [report]), (seen(broken_before=(report,)), [])):
        _, effects = step(tracked, Viewed(shown, True), 100.0)
        assert [effect.record for effect in effects if isinstance(effect, PutBroken)] == again


@pytest.mark.parametrize(
    ("last", "repeat"),
    [
        (None, 0),
        (TRACKED, 0),
        (replace_struct(TRACKED, first=2, repeat=3), 4),
        (replace_struct(TRACKED, first=2, repeat=KEPT_REPEATS), KEPT_REPEATS),
    ],
)
def test_an_agent_counts_the_false_alarms_of_a_generation_up_to_a_limit(last: Incident | None, repeat: int) -> None:
    now = agent(last=replace_struct(LAST, incident=last) if last is not None else None)
    (told,) = written(now, seen(broken=broken(2, "b", 0)))
    assert (told.first, told.repeat, told.outcome) == (2, repeat, Outcome.OPEN)


def test_a_newer_incident_keeps_the_hand_over_that_was_seen_before_it_was_known() -> None:
    """Of the first recovery, and of the failure in between, this agent has seen nothing: it was cut off from etcd."""
    first, second = (generation(number, [place("b", 0)]) for number in (1, 2))
    sync = Sync(generation=3, resumed=25, reached=25, origin=Origin.LIVE, source="live")
    incident = replace_struct(
        TRACKED, generations=(first, second, THIRD), syncs=(replace_struct(sync, generation=2), sync), planned=True,
        gone=(Cause(generation=1, node="b", kind="lost"),), timeline_s=(("aborted", 1.0),),
    )  # fmt: skip
    progress = ProgressRecord(
        generation=2, world_size=1, step=24, steps_per_s=1.0, loss=None, wall_s=60.0, step_wall_s=59.0, stepped_in=2
    )
    shown = replace(view(A, B, spec=SPEC, formed=THIRD), progress=progress)
    now, _ = step(agent(generation=THIRD, incident=incident, settled=0, last=None), Viewed(shown, True), 100.0)
    kept = now.incidents.incident
    assert kept is not None
    assert (kept.first, kept.stepped_in, kept.reached, kept.planned) == (2, 2, (2, 24), False)
    assert (kept.began_s, kept.began_wall_s, dict(kept.timeline_s).get("aborted")) == (100.0, 59.0, 0.0)
    assert sync in kept.syncs
    now, _ = step(now, Tick(), 101.0)
    assert now.incidents.incident is not None
    assert now.incidents.incident.began_s == 100.0, "once"
