"""Failures outside any generation are counted in the job's state once each, whatever other agents write meanwhile."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support import says
from support.jobs import member, view
from unit.test_recovery import SPEC, Watched

from elastic.contract.records.job_records import BrokenRecord, JobState, Phase, SpecRecord, WorkerError
from elastic.contract.records.reasons import Code, codes
from elastic.recovery.facts.restart_budget import charge
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import PutState
from elastic.recovery.machine.events import Joined, Start, Viewed, WorkerExited
from elastic.recovery.machine.model import Agent

EMPTY = view(member("a", 1, ready=()), spec=SPEC)


def shown(state: JobState, revision: int) -> JobView:
    return replace(EMPTY, state=state, state_revision=revision)


def fail(machine: Watched, slot: int = 0, fingerprint: str = "ImportError at train.py:1") -> list[PutState]:
    error = WorkerError(node="a", slot=slot, rank=-1, message="ImportError: numpyy")
    exited = WorkerExited(slot, machine.worker_id(slot), "exit code 1", 1, error, fingerprint)
    return [e for e in machine.take(exited) if isinstance(e, PutState)]


def started(job_view: JobView = EMPTY) -> Watched:
    machine = Watched()
    machine.take(Start(), Joined(), Viewed(job_view, True))
    return machine


def states(machine: Watched, job_view: JobView) -> list[PutState]:
    return [e for e in machine.see(job_view) if isinstance(e, PutState)]


def test_worker_that_fails_to_start_is_charged_to_generation_zero() -> None:
    [effect] = fail(started())
    [failure] = effect.state.failures
    assert (failure.generation, failure.node, effect.state.restarts) == (0, "a", 1)
    assert effect.state.error is not None
    assert effect.state.error.message == "ImportError: numpyy"


def test_agent_charges_a_setup_failure_of_all_its_workers_once_per_round() -> None:
    machine = started()
    state, revision, counted = JobState(), 2, []
    for _ in range(3):
        for slot in (0, 1):
            effects = fail(machine, slot)
            counted.append(len(effects))
            if effects:
                state, revision = msgspec.structs.replace(effects[0].state, phase=Phase.PENDING), revision + 1
                machine.see(shown(state, revision))
        machine.wait(SPEC.restarts.backoff_max_s)
    assert counted == [1, 0] * 3
    machine.take(*(says.ready(1, machine.worker_id(1)) for _ in range(2)))
    assert fail(machine)


def test_failure_is_counted_again_until_the_view_shows_it() -> None:
    machine = started()
    [first] = fail(machine)
    other = JobState(restarts=7)  # another agent wrote at the same moment
    [second] = states(machine, shown(other, 9))
    assert (second.expect_revision, second.state.restarts) == (9, 8)
    assert second.state.failures == first.state.failures
    assert not states(machine, shown(other, 9)), "requested a moment ago"
    assert [e.state for e in machine.wait(1.0) if isinstance(e, PutState)] == [second.state], "its answer was lost"
    assert not states(machine, shown(second.state, 10))
    assert machine.agent.etcd.uncounted == ()


def test_failure_whose_text_etcd_holds_escaped_is_counted_once() -> None:
    machine = started()
    [effect] = fail(machine, fingerprint="caf\udce9.py:1")
    [failure] = effect.state.failures
    escaped = msgspec.structs.replace(failure, fingerprint="caf\\udce9.py:1")
    assert not states(machine, shown(msgspec.structs.replace(effect.state, failures=(escaped,)), 3))
    assert machine.agent.etcd.uncounted == ()


def test_failure_to_which_the_leader_adds_a_slot_is_counted_once() -> None:
    """No view came between the two writes: a leader reads, charges and publishes within milliseconds."""
    machine = started()
    [effect] = fail(machine)
    charged = BrokenRecord(
        generation=1, node="a", kind="exit", detail="ImportError: numpyy", slots=(1,),
        fingerprint="ImportError at train.py:1", error=WorkerError(node="a", slot=1, rank=1, message="x"),
    )  # fmt: skip
    fuller = charge(effect.state, charged, SPEC.restarts, 0.0, 0).state
    assert [f.slots for f in fuller.failures] == [(0, 1)]
    assert not states(machine, shown(fuller, 5))
    assert machine.agent.etcd.uncounted == ()


def test_failure_without_etcd_is_counted_when_etcd_is_back() -> None:
    machine = started()
    machine.take(Viewed(EMPTY, False))
    assert not fail(machine)
    assert len(states(machine, EMPTY)) == 1


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.STOPPED])
def test_late_failure_does_not_change_how_the_job_ended(phase: Phase) -> None:
    machine = started()
    machine.take(Viewed(EMPTY, False))
    fail(machine)
    assert not states(machine, shown(JobState(phase=phase), 3))
    assert machine.agent.etcd.uncounted == ()


def test_a_failure_is_not_counted_against_another_job_that_has_taken_the_name() -> None:
    """The agent was cut off from etcd from the failure on, while its job was forgotten."""
    machine = Watched()
    machine.agent = Agent(msgspec.structs.replace(machine.agent.policy, submitted_wall_s=5.0))
    machine.take(Start(), Joined(), Viewed(EMPTY, False))
    assert not fail(machine)
    other = SpecRecord(spec=SPEC, submitted_wall_s=9.0, submitted_by="me", submission="another")
    assert not states(machine, replace(EMPTY, spec=other, revision=20))


def test_job_whose_workers_never_start_is_stopped_as_a_crash_loop() -> None:
    machine = started()
    revision, effects = 2, []
    for _ in range(3):
        effects = fail(machine)
        revision += 1
        machine.see(shown(effects[0].state, revision))
        machine.wait(SPEC.restarts.backoff_max_s)
    assert effects[0].state.phase is Phase.FAILED
    assert codes(effects[0].state.reason) == {Code.CRASH_LOOP}
