"""One agent's recovery, event by event: when it acts, what it sends once or again, which deaths it believes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import says
from support.jobs import Machine, broken, generation, member, place, policy, view

from elastic.contract.job.spec import Checkpoint, JobSpec
from elastic.contract.records.decoding import Member
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import Failure, GenerationRecord, JobState, Phase, SpecRecord, WorkerError
from elastic.contract.records.reasons import Code, codes, listed, reason
from elastic.contract.texts import one_line
from elastic.contract.timeouts import Timeouts
from elastic.contract.worker import messages
from elastic.recovery.facts.evidence import merged
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.facts.view import JobView
from elastic.recovery.leading import PUBLISH_AGAIN_S
from elastic.recovery.machine.effects import (
    Effect,
    ForkPlain,
    ForkWorker,
    Kill,
    Leave,
    Publish,
    PutBroken,
    PutMember,
    PutState,
    Rejoin,
    Restore,
    SaveNow,
    Send,
)
from elastic.recovery.machine.events import (
    CheckpointSaved,
    Drain,
    Event,
    GroupStuck,
    Joined,
    LeaseLost,
    PeerDead,
    Progress,
    PublishFailed,
    Start,
    StillBusy,
    StoreClosed,
    Tick,
    Undrain,
    Viewed,
    WorkerExited,
    WorkerStarted,
    WorkerUnhealthy,
)
from elastic.recovery.machine.model import Agent
from elastic.recovery.machine.turn import ASK_AGAIN_S, STALL_S
from elastic.recovery.workers.announce import IDLE_S, SUSPICION_S

TIMES = Timeouts()
SPEC = JobSpec(name="job", script="train.py", nodes="1:2", workers_per_node=2)
SECOND = generation(1, [place("b", 0, 1), place("a", 0, 1)])
"""We are a, and have node rank 1: b leads."""
FIRST = generation(1, [place("a", 0, 1), place("b", 0, 1)])
"""We lead."""
A, B = member("a", 1, ready=(0, 1)), member("b", 2, ready=(0, 1))


class Watched(Machine):
    """An agent that tests show views of the job."""

    def __init__(self, spec: JobSpec = SPEC, *, managed: bool = True) -> None:
        self.spec = spec
        super().__init__(policy(spec=spec, slots=2, managed=managed))

    def see(self, job_view: JobView) -> list[Effect]:
        return self.take(Viewed(job_view, True))

    def stages(self) -> list[Stage]:
        return [worker.stage for _, worker in sorted(self.agent.local.workers.items())]

    def worker_id(self, slot: int) -> int:
        return self.agent.local.workers[slot].worker_id


def running(spec: JobSpec = SPEC, formed: GenerationRecord = SECOND) -> Watched:
    """A machine whose two workers step in generation 1, together with b's."""
    machine = Watched(spec)
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    machine.see(view(A, B, spec=spec, formed=formed))
    machine.take(says.synced(0, 1, 1, 7), says.synced(1, 2, 1, 7))
    machine.take(says.stepping(0, 1, 1, 8), says.stepping(1, 2, 1, 8), Progress(1, 8, 0.1))
    assert machine.stages() == [Stage.RUNNING, Stage.RUNNING]
    return machine


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def sent_messages(effects: list[Effect]) -> list[messages.Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def only(effects: list[Effect]) -> Effect:
    assert len(effects) == 1, effects
    return effects[0]


# ── coming ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_agent_start_requests_a_lease_and_forks_a_worker_per_slot() -> None:
    assert kinds(Watched().take(Start())) == [Rejoin, ForkWorker, ForkWorker]


def test_agent_is_ready_when_all_its_workers_are_ready() -> None:
    machine = Watched()
    machine.take(Start(), Joined())
    assert machine.take(says.ready(0, 1)) == []
    effect = only(machine.take(says.ready(1, 2)))
    assert isinstance(effect, PutMember)
    assert effect.record.ready == (0, 1)


def test_without_a_lease_nothing_is_put() -> None:
    machine = Watched()
    machine.take(Start())
    assert machine.take(says.ready(0, 1), says.ready(1, 2)) == []
    assert kinds(machine.take(Joined())) == [PutMember]


def test_a_lost_lease_is_taken_anew_and_no_worker_hears_of_it() -> None:
    effect = only(running().take(LeaseLost("not renewed")))
    assert isinstance(effect, Rejoin)
    assert effect.record.ready == (0, 1)


def test_each_worker_is_told_its_place_once() -> None:
    machine = Watched()
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    job_view = view(A, B, spec=SPEC, formed=SECOND)
    forms = sent_messages(machine.see(job_view))
    assert [
        (f.rank, f.world_size, f.group_rank, f.local_rank, f.local_world_size, f.store_port)
        for f in forms
        if isinstance(f, messages.Form)
    ] == [(2, 4, 1, 0, 2, 1001), (3, 4, 1, 1, 2, 1001)]
    assert machine.see(job_view) == []


def test_the_newest_group_that_a_worker_has_formed_is_kept_and_tells_the_exchange_of_state_from_its_forming() -> None:
    machine = running()
    assert machine.take(says.formed(0, 1, 1), says.formed(0, 9, 3), says.formed(0, 1, 0)) == []
    assert [worker.formed for worker in machine.agent.local.workers.values()] == [1, 0]


def test_a_generation_without_us_is_none_of_our_workers_business() -> None:
    machine = Watched()
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    assert sent_messages(machine.see(view(A, B, spec=SPEC, formed=generation(1, [place("b", 0, 1)])))) == []
    again = generation(2, [place("b"), place("a", 0, 1, worker_id=2)])
    assert sent_messages(machine.see(view(A, B, spec=SPEC, formed=again))) == [], "that is our successor's place"


# ── a worker's end ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_death_is_told_and_the_slot_filled_at_once() -> None:
    machine = running()
    effects = machine.take(WorkerExited(0, 1, "signal SIGKILL", fingerprint="SIGKILL", step=9))
    said = effects[0]
    assert isinstance(said, PutBroken)
    assert (said.record.generation, said.record.slots, said.record.ranks, said.record.step) == (1, (0,), (2,), 9)
    assert said.record.charged
    order = messages.AbortGroup(generation=1, why=reason(Code.GENERATION_BROKEN))
    assert effects[1:] == [ForkWorker(0, 3), Send(1, 2, order)]


def test_a_failure_with_a_message_of_several_lines_is_reported_with_all_of_them() -> None:
    error = WorkerError(node="b", slot=0, rank=2, message="TypeError: FixedLayout(\n  'cpu',\n  size=[4]\n)")
    effects = running().take(WorkerExited(0, 1, one_line(error.message), code=1, error=error))
    assert isinstance(effects[0], PutBroken)
    assert effects[0].record.detail == "TypeError: FixedLayout( 'cpu', size=[4] )"


def test_exit_code_0_before_the_end_is_a_failure_too() -> None:
    effects = running().take(WorkerExited(0, 1, "exit code 0", code=0))
    assert isinstance(effects[0], PutBroken)
    assert effects[0].record.detail == reason(Code.ENDED_EARLY)


LACKS = "a worker cannot be started: [Errno 24] Too many open files"


def lacks(machine: Watched, slot: int, worker_id: int) -> list[Effect]:
    return machine.take(WorkerExited(slot, worker_id, LACKS, code=1, shortage=True))


def test_a_worker_that_cannot_be_started_is_charged_to_nobody_and_its_slot_waits_until_it_can() -> None:
    machine = running()
    machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    machine.see(view(A, B, spec=SPEC, formed=generation(2, SECOND.nodes)))
    effects = lacks(machine, 0, 3)
    assert kinds(effects) == [PutBroken, PutMember]
    said, changed = effects
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.slots, said.record.charged) == ("shortage", (0,), False)
    assert isinstance(changed, PutMember)
    assert (changed.record.ready, changed.record.lacks) == ((1,), "")
    assert machine.wait(0.5) == [ForkWorker(0, 4)]
    assert lacks(machine, 0, 4)[0].record.lacks == LACKS, "the third failure of the slot in a row"  # type: ignore[union-attr]
    assert ForkWorker(0, 5) in machine.wait(1.5)
    assert machine.take(WorkerStarted(0, 5)) == []
    back = machine.take(says.ready(0, 5))[0]
    assert isinstance(back, PutMember)
    assert (back.record.ready, back.record.lacks) == ((0, 1), "")


def test_a_plain_worker_that_cannot_be_started_is_tried_again_with_the_next_generation() -> None:
    machine = Watched(managed=False)
    machine.take(Start(), Joined())
    machine.see(view(A, B, spec=SPEC, formed=SECOND))
    effects = lacks(machine, 0, 1)
    assert [e.record.kind for e in effects if isinstance(e, PutBroken)] == ["shortage"]
    assert [e.record.ready for e in effects if isinstance(e, PutMember)] == [(1,)]
    assert [e.record.ready for e in machine.wait(0.3) if isinstance(e, PutMember)] == [(0, 1)]


def test_the_leader_excludes_a_node_for_what_it_lacks_takes_it_back_and_says_what_it_waits_for() -> None:
    machine = running(formed=FIRST)
    short = msgspec.structs.replace(B.record, ready=(), lacks=LACKS)
    there = view(A, Member(short, 2), spec=SPEC, formed=FIRST)
    effects = machine.see(there)
    [put] = [effect for effect in effects if isinstance(effect, PutState)]
    assert (put.state.excluded_nodes, put.state.no_agent, put.state.restarts) == (("b",), {"b": LACKS}, 0)
    excluded = view(A, B, spec=SPEC, formed=FIRST)
    excluded = dataclasses.replace(excluded, state=put.state)
    [put] = [effect for effect in machine.see(excluded) if isinstance(effect, PutState)]
    assert (put.state.excluded_nodes, put.state.no_agent) == ((), {})
    both = JobSpec(name="job", script="train.py", nodes="2", workers_per_node=2)
    waits = running(both, formed=FIRST)
    waits.see(view(A, Member(short, 2), spec=both, formed=FIRST, failed=broken(1, "b", 0)))
    *_, last = waits.agent.lead.reason.because
    assert last == reason(Code.TRIED_AGAIN, LACKS, node="b")


def test_a_second_death_in_a_row_pauses_and_a_step_forgives() -> None:
    machine = running()
    machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    effects = machine.take(WorkerExited(0, 3, "signal SIGKILL"))
    assert kinds(effects) == []
    pause_s = SPEC.restarts.backoff_s * 0.75  # half of the jitter
    assert machine.wait(pause_s - 0.01) == []
    assert machine.wait(0.02) == [ForkWorker(0, 4)]
    calm = running()
    calm.take(WorkerExited(0, 1, "signal SIGKILL"), says.ready(0, 3))
    assert calm.agent.local.workers[0].crashes == 1
    calm.take(says.stepping(0, 3, 0, 9))
    assert calm.agent.local.workers[0].crashes == 0


def test_agent_reason_names_the_newest_failure_while_the_job_cannot_start() -> None:
    machine = Watched()
    machine.take(Start(), Joined())
    error = WorkerError(node="b", slot=0, rank=-1, message="\nValueError: two\nlines")
    job_view = view(member("a", 1, ready=()), spec=SPEC)
    machine.see(dataclasses.replace(job_view, state=JobState(error=error)))
    newest = reason(Code.NEWEST_FAILURE, "ValueError: two lines", node="b")
    assert machine.agent.lead.reason == listed(reason(Code.TOO_FEW, count=0, least=1), newest)


def test_the_former_generation_is_the_newest_before_that_has_stepped_here() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=generation(2, SECOND.nodes)))
    assert machine.agent.formed.last_committed == SECOND
    machine.see(view(A, B, spec=SPEC, formed=generation(3, SECOND.nodes)))
    assert machine.agent.formed.last_committed == SECOND


def test_agent_ignores_events_of_replaced_workers() -> None:
    machine = running()
    machine.take(WorkerExited(0, 1, "signal SIGKILL"), says.ready(0, 3))
    before = machine.agent
    late = (
        says.ready(0, 1), says.synced(0, 1, 1, 9), says.stepping(0, 1, 1, 9), says.group_closed(0, 1, 1, 9, "late"),
        says.done(0, 1, 1, 9), WorkerUnhealthy(0, 1, "hang", "late"), StillBusy(0, 1), WorkerExited(0, 1, "late"),
        says.bad_numbers(0, 1, 1, 9, "nan", "late", (2,)),
    )  # fmt: skip
    assert machine.take(*late) == []
    assert machine.agent == before


def test_a_ready_standby_takes_the_place_and_its_successor_is_forked() -> None:
    machine = running(JobSpec(name="job", script="train.py", nodes="1:2", standby=1))
    assert machine.agent.local.standbys[0].stage is Stage.STARTING
    machine.take(says.ready(-1, 3))
    effects = machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    assert [e for e in effects if isinstance(e, (Send, ForkWorker))][:1] == [Send(0, 3, messages.Assign(slot=0))]
    assert ForkWorker(-1, 4, standby=True) in effects
    assert machine.worker_id(0) == 3


def test_a_standby_that_gets_ready_before_the_replacement_comes_first() -> None:
    machine = running(JobSpec(name="job", script="train.py", nodes="1:2", standby=1))
    machine.take(WorkerExited(1, machine.worker_id(1), "signal SIGKILL"))  # the standby is still in its set-up
    replacement = machine.worker_id(1)
    assert machine.agent.local.workers[1].stage is Stage.STARTING
    effects = machine.take(says.ready(-1, 3))
    assert Send(1, 3, messages.Assign(slot=1)) in effects
    assert Kill(1, replacement, reason(Code.OVERTAKEN)) in effects
    assert (machine.worker_id(1), machine.agent.local.workers[1].stage) == (3, Stage.READY)
    assert ForkWorker(-1, replacement + 1, standby=True) in effects
    before = machine.agent
    assert machine.take(WorkerExited(1, replacement, "signal SIGKILL")) == []  # it is nobody's any more
    assert machine.agent.local.workers == before.local.workers


def test_a_standby_that_dies_is_charged_to_nobody() -> None:
    machine = running(JobSpec(name="job", script="train.py", nodes="1:2", standby=1))
    assert machine.take(WorkerExited(-1, 3, "exit code 1", 1)) == [ForkWorker(-1, 4, standby=True)]


# ── aborting ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_worker_that_does_not_abort_the_group_in_time_is_killed() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    assert machine.wait(TIMES.abort_s - 0.01) == []
    assert machine.wait(0.01) == [
        Kill(slot, worker_id, reason(Code.LATE_ABORT)) for slot, worker_id in ((0, 1), (1, 2))
    ]


def test_long_steps_are_given_as_long() -> None:
    machine = running()
    machine.take(Progress(1, 9, 5.0))
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    assert machine.wait(14.9) == []
    assert kinds(machine.wait(0.1)) == [Kill, Kill]


def test_worker_that_declared_a_quiet_span_gets_more_time_to_abort() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    machine.now_s += TIMES.abort_s - 0.01
    machine.take(StillBusy(0, 1))
    assert only(machine.wait(0.01)) == Kill(1, 2, reason(Code.LATE_ABORT))
    assert kinds(machine.wait(TIMES.abort_s)) == [Kill]


def test_its_end_was_ordered_and_is_charged_to_nobody() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    machine.wait(TIMES.abort_s)
    reported, forked = machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    assert forked == ForkWorker(0, 3)
    assert machine.agent.local.workers[0].crashes == 0
    assert isinstance(reported, PutBroken), "its state is lost: it is no survivor for the next generation"
    assert (reported.record.kind, reported.record.slots, reported.record.charged) == ("respawn", (0,), False)


def test_a_worker_that_could_not_abort_because_a_signal_had_stopped_it_is_named_so() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    machine.wait(TIMES.abort_s)
    reported, _ = machine.take(WorkerExited(0, 1, "signal SIGKILL", stopped=True))
    assert isinstance(reported, PutBroken)
    assert reported.record.detail == reason(Code.LATE_ABORT, reason(Code.STOPPED))
    assert (reported.record.kind, reported.record.charged) == ("hang", False), "a cause of its own, as the one on b"
    two = merged(msgspec.structs.replace(broken(1, "b", 0, kind="hang"), ranks=(0,)), reported.record)
    (incident,) = incidents((IncidentAccount(first=1, last=2),), (two,))
    assert [(cause.node, cause.kind) for cause in incident.causes] == [("b", "hang"), ("a", "hang")]


def test_worker_forms_the_next_generation_only_after_its_group_is_closed() -> None:
    machine = running()
    second = generation(2, [place("b", 0, 1), place("a", 0, 1)])
    orders = sent_messages(machine.see(view(A, B, spec=SPEC, formed=second)))
    assert orders == [messages.AbortGroup(generation=1, why="because")] * 2
    forms = sent_messages(machine.take(says.group_closed(0, 1, 1, 8)))
    assert [m.generation for m in forms if isinstance(m, messages.Form)] == [2]


def test_a_planned_change_lets_them_step_on_to_the_boundary() -> None:
    machine = running()
    second = generation(2, [place("b", 0, 1), place("a", 0, 1), place("c")], at_step=12)
    orders = sent_messages(machine.see(view(A, B, spec=SPEC, formed=second)))
    assert orders == [messages.StopAtStep(generation=1, at_step=12, why="because")] * 2
    assert machine.stages() == [Stage.STOPPING_AT_STEP] * 2
    allowed_s = 5 * 0.1 + 2 * TIMES.abort_s  # four steps to go and the one under way
    assert machine.wait(allowed_s - 0.01) == []
    assert sent_messages(machine.wait(0.02)) == [messages.AbortGroup(generation=1, why="because")] * 2


def test_planned_generation_published_over_a_failure_is_reported_broken_too() -> None:
    """There is no boundary to step on to, and this node may be the only one that holds the state."""
    machine = running()
    machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    planned = generation(2, [place("b", 0, 1), place("a", 0, 1)], at_step=12)
    reports = [e.record for e in machine.see(view(A, B, spec=SPEC, formed=planned)) if isinstance(e, PutBroken)]
    assert [(r.generation, r.kind, r.slots) for r in reports] == [(2, "exit", (0,))]


def test_excluded_node_is_asked_for_its_state_before_its_record_says_that_it_has_one() -> None:
    machine = running(formed=FIRST)
    alone = generation(2, [place("a", 0, 1)], at_step=10)
    machine.see(view(A, B, spec=SPEC, formed=alone, excluded_nodes=("b",)))
    lost = view(A, B, spec=SPEC, formed=alone, failed=broken(2, "a", 0, 1), excluded_nodes=("b",))
    published = [effect for effect in machine.see(lost) if isinstance(effect, Publish)]
    assert [p.node for p in published[0].change.nodes] == ["a", "b"]


def test_numbers_that_are_left_out_make_no_change_unplanned_and_no_failure_forgotten() -> None:
    """As above, where the next generation is numbered above the checkpoints: etcd had lost its data before."""
    places = [place("b", 0, 1), place("a", 0, 1)]
    planned = generation(40, [*places, place("c")], at_step=12, previous=1)
    orders = sent_messages(running().see(view(A, B, spec=SPEC, formed=planned)))
    assert orders == [messages.StopAtStep(generation=1, at_step=12, why="because")] * 2
    machine = running()
    machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    over = view(A, B, spec=SPEC, formed=generation(40, places, at_step=12, previous=1))
    reports = [e.record for e in machine.see(over) if isinstance(e, PutBroken)]
    assert [(r.generation, r.kind, r.slots) for r in reports] == [(40, "exit", (0,))]


def test_the_record_of_an_older_generation_says_nothing_of_the_newest_one() -> None:
    machine = running()
    third = generation(3, [place("b", 0, 1), place("a", 0, 1)])
    machine.see(view(A, B, spec=SPEC, formed=third, failed=broken(2, "b", 0)))
    assert (machine.agent.formed.broken, machine.agent.formed.broken_record) == (0, None)


# ── suspicion ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_failed_collective_is_reported_only_after_waiting_for_the_cause() -> None:
    machine = running()
    assert machine.take(says.group_closed(0, 1, 1, 8, "connection reset")) == []
    assert machine.wait(SUSPICION_S - 0.01) == []
    said = machine.wait(0.02)[0]
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.detail, said.record.slots) == ("comm", "connection reset", ())


def test_failed_collective_is_not_reported_when_the_cause_is_on_record() -> None:
    machine = running()
    machine.take(says.group_closed(0, 1, 1, 8, "connection reset"))
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    assert not any(isinstance(e, PutBroken) for e in machine.wait(SUSPICION_S + 1.0))


def test_letting_go_as_told_is_no_failure() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=generation(2, SECOND.nodes)))
    machine.take(says.group_closed(0, 1, 1, 8, "connection reset"))
    assert machine.agent.local.suspicious_since_s is None


def test_a_refused_value_of_the_store_is_reported_at_once_and_names_itself() -> None:
    """Also where a failed collective is on record already: that follows from it."""
    machine = running()
    refused = says.group_closed(0, 1, 1, 8, "FormError: it", "k")
    said = machine.take(refused)[0]
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.detail, said.record.slots) == (
        "store", reason(Code.STORE_ALTERED, key="k"), (),
    )  # fmt: skip
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", kind="comm")))
    said = next(e for e in machine.take(refused) if isinstance(e, PutBroken))
    assert said.record.kind == "store"
    assert machine.take(says.group_closed(1, 2, 0, 8, altered="no rank of this generation wrote: k")) == [], (
        "an old one"
    )


def test_a_store_that_was_closed_breaks_its_own_generation_only() -> None:
    machine = running()
    assert machine.take(StoreClosed(2, "grew")) == []
    said = machine.take(StoreClosed(1, "grew"))[0]
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.detail, said.record.charged) == ("store", "grew", False)


def test_letting_go_for_a_failure_that_is_known_raises_no_suspicion() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    machine.take(says.group_closed(0, 1, 1, 8, "connection reset"))
    assert machine.agent.local.suspicious_since_s is None


def test_worker_that_closed_its_group_without_failure_gets_an_uncharged_report() -> None:
    machine = running()
    machine.take(says.group_closed(0, 1, 1, 8))
    assert machine.wait(IDLE_S - 0.01) == []
    said = machine.wait(0.02)[0]
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.charged) == ("idle", False)


# ── what is said again ────────────────────────────────────────────────────────────────────────────────────────


def test_that_a_generation_is_broken_is_said_again_until_the_view_shows_it() -> None:
    machine = running()
    machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    job_view = view(A, B, spec=SPEC, formed=SECOND)
    machine.now_s += ASK_AGAIN_S - 0.01
    assert machine.see(job_view) == []
    machine.now_s += 0.02
    assert kinds(machine.see(job_view)) == [PutBroken]
    assert machine.see(dataclasses.replace(job_view, broken=broken(1, "a", 0))) == []


def test_a_job_that_is_over_is_not_restored() -> None:
    """Its records were removed by `elasticctl forget`, or another job has taken its name, while its agents leave."""
    machine = running()
    over = JobState(phase=Phase.SUCCEEDED)
    machine.see(replace(view(A, B, spec=SPEC, formed=FIRST), state=over, state_revision=20, revision=20))
    gone = replace(view(A, B), spec=None, generation=None, state=JobState(), state_revision=0, revision=22)
    assert not [e for e in machine.see(gone) + machine.wait(2.0) if isinstance(e, Restore)]


def test_records_lost_by_etcd_are_restored_while_workers_train() -> None:
    machine = running()
    effect = only(machine.see(view(revision=1)))
    assert isinstance(effect, Restore)
    assert effect.generation == SECOND
    assert effect.spec is not None
    assert effect.spec.spec == SPEC


def test_an_older_generation_in_etcd_is_set_right_and_not_taken_on() -> None:
    machine = running()
    second = generation(2, SECOND.nodes)
    machine.see(view(A, B, spec=SPEC, formed=second))
    effects = machine.see(view(A, B, spec=SPEC, formed=SECOND, revision=3))
    assert [e.generation for e in effects if isinstance(e, Restore)] == [second]
    assert machine.agent.formed.generation == second


# ── leading ───────────────────────────────────────────────────────────────────────────────────────────────────


def lead_from(machine: Watched, job_view: JobView) -> list[Publish]:
    return [e for e in machine.see(job_view) if isinstance(e, Publish)]


BROKEN = view(A, B, spec=SPEC, formed=FIRST, failed=broken(1, "b", 0))


def test_leader_publishes_once_per_view() -> None:
    machine = running(formed=FIRST)
    publish = lead_from(machine, BROKEN)[0]
    assert (publish.number, publish.expect_revision, publish.at_step) == (2, BROKEN.generation_revision, None)
    assert publish.charged
    assert publish.state is not None
    assert [f.node for f in publish.state.failures] == ["b"]
    assert lead_from(machine, BROKEN) == []


def failed_on_a(others: Member) -> JobView:
    """Node a has failed twice before, and now a third time."""
    earlier = Failure(wall_s=0.0, generation=0, node="a", fingerprint="SIGKILL")
    state = JobState(phase=Phase.RUNNING, failures=(earlier, earlier))
    return replace(view(A, others, spec=SPEC, formed=FIRST, failed=broken(1, "a", 0)), state=state)


def test_failing_node_is_excluded_only_if_a_living_node_that_stays_can_be_spared() -> None:
    for others, excluded in ((B, ("a",)), (member("b", 2, ready=(0, 1), draining="maintenance"), ())):
        state = lead_from(running(formed=FIRST), failed_on_a(others))[0].state
        assert state is not None
        assert state.excluded_nodes == excluded
    machine = running(formed=FIRST)
    machine.take(PeerDead("b", "b.1", "refused"), Viewed(failed_on_a(B), True))
    [publish] = [e for e in machine.take(PublishFailed(2)) if isinstance(e, Publish)]
    assert publish.state is not None
    assert publish.state.excluded_nodes == ()


def test_leader_stops_a_crash_loop_in_place_of_the_next_generation() -> None:
    """The verdict is part of the decision: no generation is requested, and the view confirms the end."""
    once = Failure(wall_s=0.0, generation=1, node="b", fingerprint="ValueError at x.py:3", step=8)
    failed = msgspec.structs.replace(
        broken(1, "b", 0), fingerprint=once.fingerprint, step=8,
        error=WorkerError(node="b", slot=0, rank=0, message="ValueError: planted"),
    )  # fmt: skip
    again = replace(view(A, B, spec=SPEC, formed=FIRST, failed=failed), state=JobState(failures=(once, once)))
    machine = running(formed=FIRST)
    effects = machine.see(again)
    assert not any(isinstance(e, Publish) for e in effects)
    [end] = [e for e in effects if isinstance(e, PutState)]
    assert (end.state.phase, end.expect_revision) == (Phase.FAILED, again.state_revision)
    assert codes(end.state.reason) == {Code.CRASH_LOOP}
    assert not any(isinstance(e, PutState) for e in machine.wait(0.1)), "requested already"
    assert any(isinstance(e, PutState) for e in machine.wait(1.0)), "the view does not show it: requested again"


def test_failed_publish_is_retried_only_for_the_current_attempt() -> None:
    machine = running(formed=FIRST)
    assert lead_from(machine, BROKEN)
    assert kinds(machine.take(PublishFailed(7))) == []
    assert Publish in kinds(machine.take(PublishFailed(2)))


def test_a_publication_that_the_view_does_not_show_in_time_is_decided_on_anew() -> None:
    """etcd lost it, and came back with what another agent had written back, at no lower a revision."""
    machine = running(formed=FIRST)
    assert lead_from(machine, BROKEN)
    assert Publish not in kinds(machine.wait(PUBLISH_AGAIN_S - 0.1))
    assert Publish in kinds(machine.wait(0.2))
    assert Publish not in kinds(machine.wait(PUBLISH_AGAIN_S - 0.1))


def test_a_publication_that_only_the_view_is_late_for_is_not_ordered_again_and_again() -> None:
    """etcd has it, so that each further order fails at once: its leader must not write as fast as etcd answers."""
    machine = running(formed=FIRST)
    assert lead_from(machine, BROKEN)
    assert Publish in kinds(machine.wait(PUBLISH_AGAIN_S + 0.1))
    for _ in range(3):
        assert kinds(machine.take(PublishFailed(2))) == []
        assert Publish not in kinds(machine.wait(PUBLISH_AGAIN_S - 0.1))
        assert Publish in kinds(machine.wait(0.2))


def test_agent_that_is_not_leader_does_not_publish() -> None:
    machine = running(formed=SECOND)
    assert lead_from(machine, view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0))) == []


def test_agent_without_lease_or_connection_does_not_publish() -> None:
    leaseless = running(formed=FIRST)
    leaseless.take(LeaseLost("gone"))
    assert lead_from(leaseless, BROKEN) == []
    assert Publish in kinds(leaseless.take(Joined()))
    cut = running(formed=FIRST)
    assert Publish not in kinds(cut.take(Viewed(BROKEN, False)))


def test_restarted_agent_not_yet_in_the_view_does_not_publish() -> None:
    """Started anew, and a job_view from before: it shows the agent that was here, and led."""
    machine = Watched()
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    before, now = member("a", 1, worker_id=0, ready=(0, 1)), member("a", 3, ready=(0, 1))
    formed = generation(1, [place("a", 0, 1, worker_id=0), place("b", 0, 1)])
    failed = broken(1, "b", 0)
    assert lead_from(machine, view(before, B, spec=SPEC, formed=formed, failed=failed)) == []
    assert lead_from(machine, view(spec=SPEC, formed=formed, failed=failed)) == []
    assert lead_from(machine, view(now, spec=SPEC, formed=formed, failed=failed)) == []
    published = [e for e in machine.wait(TIMES.lease_ttl_s) if isinstance(e, Publish)]
    assert [p.incarnation for p in published[0].change.nodes] == ["a.1"]


def test_a_node_that_refuses_connections_is_left_out_at_once() -> None:
    machine = running(formed=FIRST)
    publish = next(e for e in machine.take(PeerDead("b", "b.1", "refused")) if isinstance(e, Publish))
    assert [p.node for p in publish.change.nodes] == ["a"]


def test_an_expired_lease_is_believed_once_steps_stop() -> None:
    machine = running(formed=FIRST)
    machine.now_s += 60.0  # since it came: by now everybody would be back in etcd
    machine.take(Progress(1, 9, 0.1))
    alone = view(A, spec=SPEC, formed=FIRST)
    assert lead_from(machine, alone) == []
    machine.now_s += STALL_S + 0.01
    assert [p.node for p in lead_from(machine, alone)[0].change.nodes] == ["a"]


@pytest.mark.parametrize(("step_s", "boundary"), [(0.1, 12), (1.0, 10), (0.01, 43)])
def test_planned_change_boundary_is_at_least_0_35_s_and_two_steps_ahead(step_s: float, boundary: int) -> None:
    """0.35 s, two steps at least; the newest step is 8."""
    machine = running(spec := JobSpec(name="job", script="train.py", nodes="1:3"), FIRST)
    machine.take(Progress(1, 8, step_s))
    job_view = view(A, B, member("c", 3), spec=spec, formed=FIRST)
    assert lead_from(machine, job_view)[0].at_step == boundary


def test_after_a_wipe_a_number_is_left_out() -> None:
    """Another agent may hold one more, published just before."""
    machine = running(formed=FIRST)
    machine.see(view(revision=1))
    assert lead_from(machine, dataclasses.replace(BROKEN, revision=11))[0].number == 3


# ── which nodes are dead ──────────────────────────────────────────────────────────────────────────────────────


def test_peer_that_renews_its_lease_beyond_the_ttl_is_no_longer_dead() -> None:
    machine = running()
    machine.take(PeerDead("b", "b.1", "refused"))
    machine.wait(TIMES.lease_ttl_s + 1.0)
    assert machine.agent.peers.dead
    machine.wait(0.01)
    assert not machine.agent.peers.dead


# ── sick workers and bad numbers ──────────────────────────────────────────────────────────────────────────────


def test_a_hung_worker_is_named_and_killed() -> None:
    effects = running().take(WorkerUnhealthy(1, 2, "hang", "stopped"))
    said = effects[0]
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.slots, said.record.ranks) == ("hang", (1,), (3,))
    assert Kill(1, 2, "stopped") in effects


def test_stuck_group_is_reported_once_and_aborted_without_a_kill() -> None:
    machine = running()
    effects = machine.take(GroupStuck(0, 1, "has waited for 5400 s"), GroupStuck(1, 2, "has waited for 5400 s"))
    (said,) = (e for e in effects if isinstance(e, PutBroken))
    assert (said.record.kind, said.record.slots, said.record.detail) == ("comm", (), "has waited for 5400 s")
    assert not any(isinstance(e, Kill) for e in effects)
    assert len(sent_messages(effects)) == 2, "both are told to abort the group"
    machine = running()
    assert machine.take(GroupStuck(0, 99, "an earlier process")) == []


def numbers(mode: str) -> list[Effect]:
    machine = running(JobSpec(name="job", script="train.py", nodes="1:2", on_bad_numbers=mode))  # type: ignore[arg-type]
    return machine.take(says.bad_numbers(0, 1, 1, 9, "nan", "loss is nan", (2,)))


def test_bad_numbers_policy_stops_rolls_back_or_ignores() -> None:
    assert numbers("ignore") == []
    end, said = numbers("stop")[:2]
    assert isinstance(end, PutState)
    assert (end.state.phase, end.expect_revision) == (Phase.FAILED, 2)
    assert end.state.reason == reason(Code.BAD_NUMBERS, "loss is nan", kind="nan", ranks="2", step=9)
    assert isinstance(said, PutBroken)
    assert (said.record.rollback, said.record.ranks, said.record.slots) == (False, (2,), ())
    said = numbers("rollback")[0]
    assert isinstance(said, PutBroken)
    assert (said.record.rollback, said.record.ranks, said.record.slots) == (True, (2,), ())
    waiting = running(JobSpec(name="job", script="train.py", nodes="1:2", on_bad_numbers="stop"))
    waiting.see(view(A, B, spec=SPEC, formed=SECOND, phase=Phase.WAITING))
    assert waiting.take(says.bad_numbers(0, 1, 1, 9, "nan", "loss is nan", (2,))) == []


@pytest.mark.parametrize("at_step", [None, 20])
@pytest.mark.parametrize("mode", ["stop", "rollback"])
def test_bad_numbers_unknown_to_the_next_generation_are_reported_again(mode: str, at_step: int | None) -> None:
    """Another agent's failed collective was in etcd first, or a planned change."""
    spec = JobSpec(name="job", script="train.py", nodes="1:2", on_bad_numbers=mode)  # type: ignore[arg-type]
    machine = running(spec)
    machine.take(says.bad_numbers(0, 1, 1, 9, "bad loss", "loss is nan", (2,)))
    formed = generation(2, SECOND.nodes, at_step=at_step)
    (said,) = [e for e in machine.see(view(A, B, spec=spec, formed=formed)) if isinstance(e, PutBroken)]
    assert (said.record.generation, said.record.kind, said.record.ranks, said.record.step) == (2, "bad loss", (2,), 9)
    assert said.record.rollback == (mode == "rollback")
    back = running(spec)
    back.take(says.bad_numbers(0, 1, 1, 9, "bad loss", "loss is nan", (2,)))
    formed = generation(2, SECOND.nodes, restore="snapshot")
    assert not [e for e in back.see(view(A, B, spec=spec, formed=formed)) if isinstance(e, PutBroken)]


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────


def ended(phase: Phase, reason: str = "") -> JobView:
    return view(A, B, spec=SPEC, formed=SECOND, phase=phase, reason=reason)


def test_when_all_is_done_workers_finish_by_themselves_and_then_the_agent_leaves_once() -> None:
    machine = running()
    machine.take(says.done(0, 1, 1, 20), says.done(1, 2, 1, 20))
    assert sent_messages(machine.see(ended(Phase.SUCCEEDED))) == [messages.Finish()] * 2
    assert machine.take(WorkerExited(0, 1, "exit code 0", 0)) == []
    assert only(machine.take(WorkerExited(1, 2, "exit code 0", 0))) == Leave(reason(Code.JOB_OVER, phase="succeeded"))
    assert machine.wait(1.0) == []


def test_worker_that_does_not_exit_in_time_after_success_is_killed() -> None:
    machine = running()
    machine.take(says.done(0, 1, 1, 20), says.done(1, 2, 1, 20))
    machine.see(ended(Phase.SUCCEEDED))
    assert machine.wait(SPEC.exit_timeout_s - 0.01) == []
    assert kinds(machine.wait(0.01)) == [Kill, Kill]


@pytest.mark.parametrize("taken", ["removed", "another job", "another job that is over"])
def test_workers_still_finish_by_themselves_when_the_records_of_the_job_are_removed(taken: str) -> None:
    """A script that saves its result after `elastic.run` needs that time, however soon after the success of its job
    its records are removed (`elasticctl forget`), or replaced by those of another job of its name."""
    machine = running()
    machine.take(says.done(0, 1, 1, 20), says.done(1, 2, 1, 20))
    machine.see(ended(Phase.SUCCEEDED))
    gone = JobView(revision=11)
    if taken != "removed":
        other = SpecRecord(spec=SPEC, submitted_wall_s=9.0, submitted_by="me", submission="another")
        phase = Phase.FAILED if "over" in taken else Phase.PENDING
        gone = replace(gone, spec=other, state=JobState(phase=phase), state_revision=11)
    assert machine.see(gone) == []
    assert machine.take(WorkerExited(0, 1, "exit code 0", 0)) == []
    assert only(machine.take(WorkerExited(1, 2, "exit code 0", 0))) == Leave(reason(Code.JOB_OVER, phase="succeeded"))


@pytest.mark.parametrize("formed", [True, False])
def test_an_agent_that_has_missed_the_end_of_its_job_does_not_take_part_in_the_next_of_the_name(formed: bool) -> None:
    """It was cut off from etcd, or still started, when its job was stopped: its workers run another script, and its
    generation and steps would outrank those of the new job."""
    machine = Watched()
    machine.agent = Agent(msgspec.structs.replace(machine.agent.policy, submitted_wall_s=5.0))
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    mine = SpecRecord(spec=SPEC, submitted_wall_s=5.0, submitted_by="me", submission="mine")
    if formed:
        machine.see(replace(view(A, B, formed=SECOND), spec=mine))
    backup = msgspec.structs.replace(mine, submitted_wall_s=4.0, submission="earlier")
    assert not [e for e in machine.see(replace(view(A, B, formed=SECOND), spec=backup)) if isinstance(e, Kill)]
    other = msgspec.structs.replace(mine, submitted_wall_s=9.0, submission="another")
    effects = machine.see(JobView(spec=other, members={"a": A}, state_revision=20, revision=20))
    assert [e.worker_id for e in effects if isinstance(e, Kill)] == [1, 2]
    assert not [e for e in effects if isinstance(e, Restore | Publish | PutState)]
    machine.take(WorkerExited(0, 1, "signal SIGTERM"))
    assert only(machine.take(WorkerExited(1, 2, "signal SIGTERM"))) == Leave(reason(Code.NAME_REUSED))


def test_a_stopped_job_ends_its_workers_gently_and_charges_nobody() -> None:
    machine = running()
    effects = machine.see(ended(Phase.STOPPING))
    assert [(e.worker_id, e.graceful) for e in effects if isinstance(e, Kill)] == [(1, True), (2, True)]
    assert machine.take(WorkerExited(0, 1, "exit code 1", 1)) == []
    assert only(machine.take(WorkerExited(1, 2, "signal SIGTERM"))) == Leave(reason(Code.JOB_OVER, phase="stopping"))


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.FAILED])
def test_worker_aborting_the_group_when_the_job_ends_gets_its_grace_time(phase: Phase) -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=SECOND, failed=broken(1, "b", 0)))
    effects = machine.see(ended(phase, "no more")) + machine.wait(0.1)
    kills = [effect for effect in effects if isinstance(effect, Kill)]
    assert [(e.worker_id, e.graceful, e.why) for e in kills] == [
        (worker_id, True, reason(Code.JOB_OVER, "no more", phase=phase.value)) for worker_id in (1, 2)
    ]


def test_leader_writes_succeeded_when_all_present_nodes_are_done() -> None:
    machine = running(formed=FIRST)
    machine.take(says.done(0, 1, 1, 20), says.done(1, 2, 1, 20))
    mine = member("a", 1, ready=(0, 1), done=1)
    assert not any(isinstance(e, PutState) for e in machine.see(view(mine, B, spec=SPEC, formed=FIRST)))
    both = view(mine, member("b", 2, ready=(0, 1), done=1), spec=SPEC, formed=FIRST)
    [end] = [e for e in machine.see(both) if isinstance(e, PutState)]
    assert (end.state.phase, end.state.reason, end.expect_revision) == (Phase.SUCCEEDED, "", 2)


@pytest.mark.parametrize(("clean", "consistent"), [((True, True), 1), ((False, True), 1), ((False, False), 0)])
def test_a_node_that_is_left_out_tells_whether_the_state_of_its_workers_is_consistent(
    clean: tuple[bool, bool], consistent: int
) -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=generation(2, [place("b", 0, 1)])))
    for slot, whole in enumerate(clean):
        machine.take(says.group_closed(slot, slot + 1, 1, 8, clean=whole))
    told = machine.agent.etcd.published
    assert told is not None
    assert (told.held_generation, told.held_consistent) == (1, consistent)


def test_a_node_that_drains_tells_of_its_older_state_until_it_leaves() -> None:
    """It waits until the next generation has stepped, and is to be asked if that one fails before."""
    machine = running()
    machine.take(Drain("maintenance", math.inf))
    machine.see(view(A, B, spec=SPEC, formed=generation(2, [place("b", 0, 1)], at_step=8)))
    for slot in (0, 1):
        machine.take(says.group_closed(slot, slot + 1, 1, 8, clean=True))
    told = machine.agent.etcd.published
    assert told is not None
    assert (told.draining, told.held_generation, told.held_consistent) == ("maintenance", 1, 1)


def test_a_node_that_is_left_out_tells_of_its_state_while_its_workers_run_on_to_the_boundary() -> None:
    """The generation without it may fail before: then its new nodes have nothing yet."""
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=generation(2, [place("b", 0, 1)], at_step=30)))
    told = machine.agent.etcd.published
    assert told is not None
    assert (told.held_generation, told.held_consistent) == (1, 0), "whether it is consistent is not known yet"


@pytest.mark.parametrize(("at_step", "numbers"), [(8, [2, 1]), (None, [1])])
def test_a_generation_breaks_when_a_worker_dies_on_its_way_into_it(at_step: int | None, numbers: list[int]) -> None:
    """Of a planned change: a node that was left out may have the state alone. After a failure all are asked anyway."""
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=generation(2, [place("a", 0, 1)], at_step=at_step)))
    machine.wait(5.0)  # it does not leave its group in time
    effects = machine.take(WorkerExited(0, 1, "killed by SIGKILL"))
    assert [e.record.generation for e in effects if isinstance(e, PutBroken)] == numbers


def test_a_node_whose_workers_have_made_no_step_has_no_state_to_tell_of() -> None:
    """To ask it would only make the next generation larger than its job allows."""
    machine = Watched(SPEC)
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    machine.see(view(A, B, spec=SPEC, formed=SECOND))
    machine.take(says.synced(0, 1, 1, 0), says.synced(1, 2, 1, 0))
    machine.see(view(A, B, spec=SPEC, formed=generation(2, [place("b", 0, 1)])))
    told = machine.agent.etcd.published
    assert told is not None
    assert told.held_generation == 0


def test_a_node_does_not_tell_of_state_that_the_job_has_gone_back_from() -> None:
    machine = running()
    machine.see(view(A, B, spec=SPEC, formed=generation(2, [place("b", 0, 1)], restore="snapshot")))
    told = machine.agent.etcd.published
    assert told is not None
    assert told.held_generation == 0


# ── drains ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_drained_node_without_a_rank_leaves_at_once() -> None:
    machine = Watched()
    machine.take(Start(), Joined(), says.ready(0, 1), says.ready(1, 2))
    assert kinds(machine.take(Drain("maintenance", 1e9))) == [Kill, Kill]
    machine.take(WorkerExited(0, 1, "signal SIGTERM"))
    assert only(machine.take(WorkerExited(1, 2, "signal SIGTERM"))) == Leave(reason(Code.DRAINED, "maintenance"))


def test_a_drain_is_announced_and_waits_for_the_leader() -> None:
    machine = running()
    effect = only(machine.take(Drain("maintenance", machine.now_s + 60.0)))
    assert isinstance(effect, PutMember)
    assert effect.record.draining == "maintenance"


def test_drained_node_leaves_at_its_deadline() -> None:
    machine = running()
    machine.take(Drain("maintenance", machine.now_s + 60.0))
    assert machine.wait(59.9) == []
    effects = machine.wait(0.1)
    said = effects[0]
    assert isinstance(said, PutBroken)
    assert (said.record.kind, said.record.slots, said.record.charged) == ("drain", (0, 1), False)
    assert kinds(effects[1:]) == [Kill, Kill]


def test_a_deadline_that_is_set_later_is_obeyed_and_the_checkpoint_of_the_drain_still_counts() -> None:
    machine = running()
    machine.take(Drain("maintenance", math.inf), CheckpointSaved(1, 7))
    assert machine.wait(1000.0) == []
    machine.take(Drain("maintenance", machine.now_s + 60.0))
    assert machine.agent.drain.drain_saved == (1, 7)
    assert kinds(machine.wait(60.0)) == [PutBroken, Kill, Kill]


def test_a_node_that_leaves_at_its_deadline_names_no_step_of_before_the_job_went_back() -> None:
    machine = running()
    machine.take(Progress(1, 100, 0.1))
    machine.take(WorkerExited(0, 1, "signal SIGKILL", step=100), WorkerExited(1, 2, "signal SIGKILL", step=100))
    machine.see(view(A, B, spec=SPEC, formed=generation(2, SECOND.nodes)))
    machine.take(says.ready(0, 3), says.ready(1, 4))
    machine.take(says.synced(0, 3, 2, 90), says.synced(1, 4, 2, 90), says.stepping(0, 3, 2, 91))
    effects = machine.take(Drain("maintenance", machine.now_s))
    (said,) = [effect.record for effect in effects if isinstance(effect, PutBroken)]
    assert (said.kind, said.generation, said.step) == ("drain", 2, 91)


def test_the_last_node_stays_until_its_state_is_saved() -> None:
    spec = JobSpec(name="job", script="train.py", nodes="2:2", checkpoint=Checkpoint(dir="/c"))
    machine = running(spec)
    asked = machine.take(Drain("maintenance", machine.now_s + 600.0))
    assert [e for e in asked if isinstance(e, SaveNow)] == [SaveNow(reason(Code.LEAVES, "maintenance", node="a"), True)]
    machine.take(says.group_closed(0, 1, 1, 12), says.group_closed(1, 2, 1, 12), CheckpointSaved(1, 11))
    assert machine.agent.drain.leaving is None
    machine.take(CheckpointSaved(1, 12))
    assert machine.agent.drain.leaving == reason(Code.DRAINED, "maintenance")


def test_a_checkpoint_of_the_course_that_the_job_has_gone_back_from_does_not_count_for_a_drain() -> None:
    """Step 100 of generation 1 was saved; the job went back to step 50, and its newest checkpoint on record stays that
    of step 100 until the next one is written."""
    spec = JobSpec(name="job", script="train.py", nodes="2:2", workers_per_node=2, checkpoint=Checkpoint(dir="/c"))
    machine = running(spec)
    machine.take(Progress(1, 100, 0.1))
    machine.take(WorkerExited(0, 1, "signal SIGKILL", step=100), WorkerExited(1, 2, "signal SIGKILL", step=100))
    second = generation(2, SECOND.nodes, restore="snapshot")
    shown = view(A, B, spec=spec, formed=second, saved_step=100, saved_generation=1)
    machine.see(shown)
    machine.take(says.ready(0, 3), says.ready(1, 4))
    machine.take(says.synced(0, 3, 2, 50), says.synced(1, 4, 2, 50))
    machine.take(says.stepping(0, 3, 2, 51), says.stepping(1, 4, 2, 51), Progress(2, 55, 0.1))
    assert any(isinstance(effect, SaveNow) for effect in machine.take(Drain("maintenance", machine.now_s + 600.0)))
    machine.take(says.group_closed(0, 3, 2, 55), says.group_closed(1, 4, 2, 55))
    assert machine.agent.drain.leaving is None
    machine.see(replace(shown, saved_step=55, saved_generation=2, revision=11))
    assert machine.agent.drain.leaving == reason(Code.DRAINED, "maintenance")


def test_a_checkpoint_whose_generation_is_not_on_record_counts_by_its_step() -> None:
    spec = JobSpec(name="job", script="train.py", nodes="2:2", workers_per_node=2, checkpoint=Checkpoint(dir="/c"))
    machine = running(spec)
    machine.see(view(A, B, spec=spec, formed=SECOND, saved_step=12))
    machine.take(Drain("maintenance", machine.now_s + 600.0))
    machine.take(says.group_closed(0, 1, 1, 12), says.group_closed(1, 2, 1, 12))
    assert machine.agent.drain.leaving == reason(Code.DRAINED, "maintenance")


def test_a_drain_called_off_is_withdrawn() -> None:
    machine = running()
    machine.take(Drain("maintenance", machine.now_s + 60.0))
    effect = only(machine.take(Undrain()))
    assert isinstance(effect, PutMember)
    assert effect.record.draining is None
    assert machine.wait(60.0) == []


# ── a script that knows nothing of elastic ────────────────────────────────────────────────────────────────────


def test_its_workers_are_forked_into_each_generation_anew() -> None:
    machine = Watched(managed=False)
    assert kinds(machine.take(Start(), Joined())) == [Rejoin], "and nobody before there is a rank"
    effects = machine.see(view(A, B, spec=SPEC, formed=SECOND))
    assert [(e.slot, e.generation.number) for e in effects if isinstance(e, ForkPlain)] == [(0, 1), (1, 1)]
    effects = machine.see(view(A, B, spec=SPEC, formed=generation(2, SECOND.nodes)))
    assert [e.worker_id for e in effects if isinstance(e, Kill)] == [1, 2]
    machine.take(WorkerExited(0, 1, "signal SIGKILL"))
    assert machine.worker_id(0) == 3


# ── anything at all ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_event_is_a_mistake_of_ours() -> None:
    with pytest.raises((AssertionError, AttributeError)):
        running().take("nonsense")  # type: ignore[arg-type]


PICTURES = (
    view(revision=1),
    view(A, spec=SPEC),
    view(A, B, spec=SPEC),
    view(A, B, spec=SPEC, formed=FIRST),
    view(A, B, spec=SPEC, formed=SECOND),
    BROKEN,
    view(A, spec=SPEC, formed=generation(2, [place("a", 0, 1)]), revision=12),
    view(A, B, spec=SPEC, formed=generation(3, SECOND.nodes, at_step=20), revision=14),
    view(A, member("b", 9, worker_id=2, ready=(0, 1)), spec=SPEC, formed=generation(3, SECOND.nodes), revision=15),
    view(A, B, spec=SPEC, formed=SECOND, phase=Phase.STOPPING),
    view(A, B, spec=SPEC, formed=SECOND, phase=Phase.SUCCEEDED),
)
slots, worker_ids, numbers_ = st.integers(-1, 2), st.integers(0, 6), st.integers(0, 3)
steps = st.integers(0, 20)
happenings: st.SearchStrategy[Event] = st.one_of(
    st.builds(Joined),
    st.builds(LeaseLost, st.just("gone")),
    st.builds(Viewed, st.sampled_from(PICTURES), st.booleans()),
    st.builds(PublishFailed, numbers_),
    st.builds(says.ready, slots, worker_ids),
    st.builds(says.synced, slots, worker_ids, numbers_, steps),
    st.builds(says.stepping, slots, worker_ids, numbers_, steps),
    st.builds(
        says.group_closed,
        slots,
        worker_ids,
        numbers_,
        steps,
        st.sampled_from(["", "reset"]),
        st.sampled_from(["", "", "altered"]),
    ),
    st.builds(says.done, slots, worker_ids, numbers_, steps),
    st.builds(WorkerExited, slots, worker_ids, st.just("signal SIGKILL")),
    st.builds(WorkerUnhealthy, slots, worker_ids, st.just("hang"), st.just("stopped")),
    st.builds(StillBusy, slots, worker_ids),
    st.builds(says.bad_numbers, slots, worker_ids, numbers_, steps, st.just("nan"), st.just("nan"), st.just(())),
    st.builds(PeerDead, st.just("b"), st.just("b.1"), st.just("refused")),
    st.builds(Progress, numbers_, steps, st.sampled_from([0.0, 0.1])),
    st.builds(Drain, st.just("off"), st.floats(100.0, 200.0)),
    st.builds(Undrain),
    st.builds(CheckpointSaved, numbers_, steps),
    st.builds(StoreClosed, st.integers(0, 5), st.just("grew")),
    st.builds(Tick),
)


@given(st.lists(st.tuples(happenings, st.sampled_from([0.0, 0.0, 0.1, 1.0, 11.0])), max_size=40), st.integers(0, 1))
def test_agent_invariants_hold_in_any_order_of_events(events: list[tuple[Event, float]], standby: int) -> None:
    machine = Watched(JobSpec(name="job", script="train.py", nodes="1:2", standby=standby))
    worker_ids: set[int] = set()
    newest, left = 0, 0
    for event, after_s in [(Start(), 0.0), *events]:
        machine.now_s += after_s
        for following in (event, Tick()):
            effects = machine.take(following)
            for effect in effects:
                match effect:
                    case ForkWorker(_, worker_id):
                        assert worker_id not in worker_ids, "a life is one process"
                        worker_ids.add(worker_id)
                    case Send(_, worker_id) | Kill(_, worker_id):
                        assert worker_id in worker_ids, "nobody else is spoken to"
                    case Leave():
                        left += 1
            assert left <= 1
            number = machine.agent.formed.generation.number if machine.agent.formed.generation else 0
            assert number >= newest, "an older generation is never taken on"
            newest = number
            assert set(machine.agent.local.workers) == {0, 1}
            assert kinds(effects).count(Publish) <= 1
        before = machine.agent
        assert machine.take(Tick()) == [], "what follows does so at once"
        assert machine.agent == before
