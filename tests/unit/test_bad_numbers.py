"""Of several reports of bad numbers that of the earliest step names the cause, whichever comes first."""

from __future__ import annotations

import msgspec
import pytest
from support import says
from support.jobs import Machine, broken, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.incident_account import IncidentAccount, Outcome
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import BrokenRecord, Phase
from elastic.contract.records.reasons import Code, Text, reason
from elastic.recovery.machine.effects import Effect, Leave, PutBroken, PutState
from elastic.recovery.machine.events import (
    Joined,
    Progress,
    Start,
    Viewed,
)

SPEC = JobSpec(name="job", script="train.py", nodes="1:2", on_bad_numbers="stop")
FORMED = generation(1, [place("b"), place("a")])
OURS = says.bad_numbers(0, 1, 1, 13, "bad loss", "loss is nan", (1,))
"""We are a, with rank 1; b leads."""
OURS_SAID = reason(Code.BAD_NUMBERS, "loss is nan", kind="bad loss", ranks="1", step=13)


def theirs(step: int) -> BrokenRecord:
    said = broken(1, "b", kind="bad loss")
    detail = reason(Code.BAD_NUMBERS, "loss is nan", kind="bad loss", ranks="0", step=step)
    return msgspec.structs.replace(said, ranks=(0,), step=step, detail=detail)


def failed(by: BrokenRecord, phase: Phase = Phase.FAILED, why: Text = "") -> Viewed:
    said = why or by.detail
    members = member("a", 1), member("b", 2)
    return Viewed(view(*members, spec=SPEC, formed=FORMED, failed=by, phase=phase, reason=said), True)


@pytest.fixture
def machine() -> Machine:
    machine = Machine(policy(spec=SPEC))
    machine.take(Start(), Joined(), says.ready(0, 1))
    machine.take(Viewed(view(member("a", 1), member("b", 2), spec=SPEC, formed=FORMED), True))
    machine.take(says.synced(0, 1, 1, 7), says.stepping(0, 1, 1, 8), Progress(1, 8, 0.1))
    return machine


def reasons(effects: list[Effect]) -> list[Text]:
    return [effect.state.reason for effect in effects if isinstance(effect, PutState)]


def reported(effects: list[Effect]) -> list[int | None]:
    return [effect.record.step for effect in effects if isinstance(effect, PutBroken)]


def named(effects: list[Effect]) -> list[tuple[Text, tuple[int, ...]]]:
    """(detail, ranks by first cause) of the incident, by what is reported now."""
    reports = [effect.record for effect in effects if isinstance(effect, PutBroken)]
    found = incidents([IncidentAccount(first=1, last=1, outcome=Outcome.GIVEN_UP)], reports)
    return [(incident.detail, tuple(cause.ranks[0] for cause in incident.causes)) for incident in found]


def test_the_reason_of_a_job_is_the_cause_though_a_consequence_of_it_has_failed_the_job(machine: Machine) -> None:
    effects = machine.take(OURS)
    assert (reasons(effects), reported(effects)) == ([OURS_SAID], [13])
    effects = machine.take(failed(theirs(14)))
    assert reasons(effects) == [OURS_SAID], "the state was b's at that revision"
    assert not any(isinstance(effect, Leave) for effect in effects)
    assert reasons(machine.take(failed(theirs(14), why=OURS_SAID))) == []


def test_the_cause_is_reported_though_the_job_has_failed_by_a_consequence_of_it(machine: Machine) -> None:
    assert reasons(machine.take(failed(theirs(14)))) == []
    effects = machine.take(OURS)
    assert (reasons(effects), reported(effects)) == ([OURS_SAID], [13])
    assert named(effects) == [(OURS_SAID, (1,))], "whether b had the time to report what followed is chance"


@pytest.mark.parametrize("step", [12, 13])
def test_a_consequence_changes_nothing(machine: Machine, step: int) -> None:
    machine.take(failed(theirs(step)))
    assert not [e for e in machine.take(OURS) if isinstance(e, PutState | PutBroken)]


def test_a_job_that_is_stopped_or_has_failed_otherwise_keeps_its_reason(machine: Machine) -> None:
    machine.take(failed(theirs(14), Phase.STOPPED, "enough"))
    assert reasons(machine.take(OURS)) == []
    assert reasons(machine.take(failed(theirs(14), Phase.FAILED, "no node took it"))) == []


@pytest.mark.parametrize(("restore", "breaks"), [("snapshot", 1), ("newest", 2)])
def test_a_late_report_belongs_to_its_generation_if_the_job_goes_back_already(restore: str, breaks: int) -> None:
    """Otherwise the generation after it goes on from the bad numbers."""
    spec = msgspec.structs.replace(SPEC, on_bad_numbers="rollback")
    machine, members = Machine(policy(spec=spec)), (member("a", 1), member("b", 2))
    machine.take(Start(), Joined(), says.ready(0, 1), Viewed(view(*members, spec=spec, formed=FORMED), True))
    machine.take(says.synced(0, 1, 1, 7), says.stepping(0, 1, 1, 8), Progress(1, 8, 0.1))
    first = msgspec.structs.replace(theirs(13), rollback=True)
    machine.take(Viewed(view(*members, spec=spec, formed=FORMED, failed=first), True))
    next_one = generation(2, [place("b"), place("a")], restore=restore)
    machine.take(Viewed(view(*members, spec=spec, formed=next_one, revision=11), True))
    told = [e.record for e in machine.take(OURS) if isinstance(e, PutBroken)]
    assert [(record.generation, record.ranks) for record in told] == [(breaks, (1,))]
    assert (machine.agent.formed.broken >= 2) == (breaks == 2)
