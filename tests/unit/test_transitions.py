"""The table of a worker's transitions: all of it is used, and nothing else happens."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import says
from support.jobs import broken, changed, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec, Restarts
from elastic.contract.records import phases
from elastic.contract.records.job_records import JobState, Phase
from elastic.contract.records.phases import PHASES, PhaseTrigger
from elastic.recovery.facts import transitions
from elastic.recovery.facts.restart_budget import charge
from elastic.recovery.facts.transitions import TABLE, Stage, Trigger, UnknownTransition, after
from elastic.recovery.machine.events import (
    Event,
    GroupStuck,
    Joined,
    Start,
    StillBusy,
    Tick,
    Viewed,
    WorkerExited,
    WorkerFailed,
    WorkerUnhealthy,
)
from elastic.recovery.machine.model import Agent, Worker
from elastic.recovery.recovery import step

CORE = Path(transitions.__file__).parent
PLAIN = {Stage.READY, Stage.RUNNING, Stage.KILLED, Stage.DONE}
"""The stages of a plain worker."""
SPEC = JobSpec(name="job", script="train.py", nodes="1:2", workers_per_node=2)
FIRST = generation(1, [place("a", 0, 1), place("b", 0, 1)])
A, B = member("a", 1, ready=(0, 1)), member("b", 2, ready=(0, 1))


def test_a_pair_that_the_table_does_not_have_raises() -> None:
    unknown = set(itertools.product(Stage, Trigger)) - set(TABLE)
    assert unknown
    for stage, trigger in unknown:
        with pytest.raises(UnknownTransition, match=trigger.value):
            after(stage, trigger)


def test_every_stage_can_be_reached_and_left() -> None:
    assert set(TABLE.values()) == set(Stage)
    assert {stage for stage, _ in TABLE} == set(Stage)


def test_a_process_that_ends_is_always_noticed() -> None:
    """Whatever the stage, an exit leads to one without a process."""
    for stage in set(Stage) - {Stage.GONE}:
        assert after(stage, Trigger.EXITED) is Stage.GONE


def _stage_written(tree: ast.AST) -> list[int]:
    """Lines where a worker's stage is set without the table."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        for word in node.keywords:
            # Worker(stage=…) makes a new one; replace(worker, stage=…) changes one.
            if word.arg == "stage" and ast.unparse(node.func) != "Worker" and "after(" not in ast.unparse(word.value):
                lines.append(node.lineno)
    return lines


def test_no_stage_is_set_but_by_the_table() -> None:
    assert not {p.name: lines for p in CORE.glob("*.py") if (lines := _stage_written(ast.parse(p.read_text())))}


def test_that_check_bites() -> None:
    assert _stage_written(ast.parse("replace(worker, stage=Stage.GONE)"))
    assert not _stage_written(ast.parse("replace(worker, stage=after(worker.stage, Trigger.EXITED))"))


def _events(generation: int) -> list[Event]:
    """All that can be heard of the worker of slot 0, process 1."""
    return [
        says.managed(0, 1), says.ready(0, 1), says.formed(0, 1, generation),
        says.synced(0, 1, generation, 9), says.stepping(0, 1, generation, 9),
        says.group_closed(0, 1, generation, 9), says.group_closed(0, 1, generation, 9, "closed by peer"),
        says.done(0, 1, generation, 9), WorkerFailed(0, 1, "exit code 1", 1),
        WorkerExited(0, 1, "exit code 0", code=0), WorkerExited(0, 1, "signal SIGKILL"),
        WorkerUnhealthy(0, 1, "hang", "no progress"), GroupStuck(0, 1, "aborted"),
        StillBusy(0, 1), says.bad_numbers(0, 1, generation, 9, "numbers", "loss is nan", (0,)),
    ]  # fmt: skip


@pytest.mark.parametrize("standby", [0, 1])
@pytest.mark.parametrize("managed", [True, False])
def test_every_event_may_come_in_every_stage(managed: bool, standby: int) -> None:
    """Late, twice, of an older generation, while the job ends or goes on: no pair is missing in the table."""
    seen: set[tuple[Stage, Stage]] = set()
    ends = (Phase.RUNNING, Phase.SUCCEEDED)
    stages = set(Stage) if managed else PLAIN
    for stage, told, is_broken, phase in itertools.product(stages, (0, 1), (False, True), ends):
        for index in range(len(_events(1))):
            before = _agent(stage, managed, told, standby)
            job_view = view(A, B, spec=SPEC, formed=FIRST, phase=phase)
            if is_broken:
                job_view = dataclasses.replace(job_view, broken=broken(1, "b", 0))
            after_event, _ = step(before, _events(1)[index], 200.0)
            seen.add((stage, after_event.local.workers[0].stage))
            agent = after_event
            for at_s, event in ((200.1, Viewed(job_view, True)), (200.2, _events(1)[index]), (900.0, Tick())):
                agent, _ = step(agent, event, at_s)
    assert {before for before, _ in seen} == stages


def test_every_event_may_come_of_a_standby_in_every_stage() -> None:
    for stage, phase in itertools.product(Stage, (Phase.RUNNING, Phase.STOPPING)):
        for event in _events(1):
            agent = _agent(Stage.RUNNING, True, 1, 1)
            there = replace(agent.local.standbys[0], worker_id=1, slot=-1, stage=stage)
            mine = replace(agent.local.workers[0], worker_id=7)
            agent = changed(agent, standbys=(there,), workers={0: mine, 1: agent.local.workers[1]})
            job_view = view(A, B, spec=SPEC, formed=FIRST, phase=phase)
            for at_s, now in ((200.0, event), (200.1, Viewed(job_view, True)), (200.2, event), (900.0, Tick())):
                agent, _ = step(agent, now, at_s)


def _agent(stage: Stage, managed: bool, generation: int, standbys: int) -> Agent:
    """One of two nodes in generation 1, whose worker of slot 0 (process 1) is in `stage`."""
    agent = Agent(policy(spec=replace(SPEC, on_loss="shrink", standby=standbys), slots=2, managed=managed))
    for event in (Start(), Joined(), Viewed(view(A, B, spec=SPEC, formed=FIRST), True), Tick()):
        agent, _ = step(agent, event, 100.0)
    workers = {slot: replace(worker, worker_id=slot + 1) for slot, worker in agent.local.workers.items()}
    workers[0] = replace(workers[0], stage=stage, generation=generation, synced=generation, deadline_s=150.0)
    ready = Worker(slot=-1, worker_id=9, stage=Stage.READY)
    return changed(agent, workers=workers, spawned=9, standbys=(ready,) * standbys)


def test_a_job_that_was_told_to_stop_does_not_fail_meanwhile() -> None:
    """Its last failure is charged, and the phase is left to the agents that go."""
    rules = Restarts(budget=0)
    for phase in (Phase.STOPPING, Phase.STOPPED, Phase.SUCCEEDED):
        verdict = charge(JobState(phase=phase, reason="enough"), broken(3, "a", 0), rules, 100.0, None)
        assert (verdict.stopped, verdict.state.phase, verdict.state.reason) == ("", phase, "enough")
        assert verdict.state.restarts == 1
    assert charge(JobState(phase=Phase.RUNNING), broken(3, "a", 0), rules, 100.0, None).state.phase is Phase.FAILED


def test_a_phase_that_the_table_does_not_have_raises() -> None:
    for phase, trigger in set(itertools.product(Phase, PhaseTrigger)) - set(PHASES):
        with pytest.raises(UnknownTransition, match=trigger.value.split("(")[0]):
            phases.after(JobState(phase=phase), trigger, "", 1.0)
    over = {phase for phase in Phase if phase.over}
    assert {phase for phase in over for trigger in PhaseTrigger if phases.allows(phase, trigger)} == over
    left = {(phase, trigger): to for (phase, trigger), to in PHASES.items() if phase.over}
    assert left.pop((Phase.SUCCEEDED, PhaseTrigger.WITHDRAWN)) is Phase.FAILED, "a success may prove to be none"
    assert set(left.values()) == {Phase.STOPPED}, "else only closed"
