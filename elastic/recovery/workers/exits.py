"""Worker exits: what replaces the worker, after what pause, and whether the exit counts against the restart budget."""

from __future__ import annotations

from elastic.contract.records.job_records import BrokenRecord, GenerationRecord, Phase
from elastic.contract.records.phases import PhaseTrigger, after, allows
from elastic.contract.records.reasons import Code, Reason, Text, reason
from elastic.contract.structs import replace
from elastic.contract.texts import one_line
from elastic.recovery.facts.evidence import merged
from elastic.recovery.facts.restart_budget import SHORTAGE, backoff_s
from elastic.recovery.facts.transitions import HOLDS, IN_GROUP, Stage, Trigger
from elastic.recovery.machine.effects import PutBroken, PutState
from elastic.recovery.machine.events import WorkerExited, WorkerFailed
from elastic.recovery.machine.model import Agent, PendingFailure, Worker, has_process
from elastic.recovery.machine.turn import Turn

from .announce import add_evidence, failure, report_failure, uncharged, worker_failure
from .workers import promote

SHORTAGE_S = 0.25
"""First pause after a process could not be started for lack of something."""


def exited(turn: Turn, event: WorkerExited) -> None:
    if standby := turn.standby(event.worker_id):
        if standby.stage is Stage.GONE:
            return  # reported before
        pause = backoff_s(standby.crashes + 1, turn.policy.spec.restarts, turn.jitter)
        counted = replace(standby, crashes=standby.crashes + 1)
        turn.put_standby(standby, turn.moved(counted, Trigger.EXITED, turn.now_s + pause))
        return  # does not count against the restart budget
    worker = turn.find(event.slot, event.worker_id)
    if worker is None or not has_process(worker, turn.policy.managed):
        return
    worker = replace(worker, step=max(worker.step, event.step))
    turn.reaches(worker.synced, event.step)
    expected = worker.stage in (Stage.KILLED, Stage.ABORTING) or turn.is_over()
    if turn.etcd.view.state.phase is Phase.STOPPING and _struck_down(turn, worker, event):
        _report_at_the_end(turn, worker, event)
    if event.shortage:
        _never_started(turn, worker, event)
        return
    if not turn.policy.managed:
        _plain_exited(turn, worker, event, expected)
        return
    _withdraw_success(turn, worker, event)
    crashes = worker.crashes + (0 if expected else 1)
    pause = backoff_s(crashes, turn.policy.spec.restarts, turn.jitter)
    turn.move(replace(worker, crashes=crashes, lacks=""), Trigger.EXITED, turn.now_s + pause)
    promote(turn, worker.slot)
    if not expected:
        _report_exit(turn, worker, event)
    elif (
        worker.slot in turn.my_ranks()
        and not turn.is_broken()
        and (turn.policy.shrink or _lost_on_its_way(turn, worker))
    ):
        killed = worker.stage is Stage.KILLED
        detail = _late(event) if killed else event.cause
        report_failure(turn, uncharged(worker_failure(turn, worker, "respawn", detail)))
        if not killed and worker.generation:
            _report_fallen(turn, worker, event)
    elif worker.generation:
        _report_fallen(turn, worker, event)


def _never_started(turn: Turn, worker: Worker, event: WorkerExited) -> None:
    """The node lacks what a process needs. That is no fault of the script, whose budget it does not touch: the job goes
    on without the slot, which is tried again and again."""
    crashes = worker.crashes + 1
    pause_s = max(SHORTAGE_S, backoff_s(crashes, turn.policy.spec.restarts, turn.jitter))
    trigger = Trigger.EXITED if turn.policy.managed else Trigger.EXITED_PLAIN
    turn.move(replace(worker, crashes=crashes, lacks=event.cause), trigger, turn.now_s + pause_s)
    if turn.policy.managed and promote(turn, worker.slot):
        return
    if worker.slot in turn.my_ranks():
        report_failure(turn, uncharged(worker_failure(turn, worker, SHORTAGE, event.cause)))


def _withdraw_success(turn: Turn, worker: Worker, event: WorkerExited) -> None:
    """Training was complete, and the rest of the script failed, or did what elastic refuses, such as a second training:
    what it was to do, as to save the model, is not done, and must not count as that."""
    view, error = turn.etcd.view, event.error
    why: Text = ""
    if error is not None and error.misuse:
        why = one_line(error.message)
    elif event.undone and worker.stage in (Stage.DONE, Stage.ABORTING, Stage.KILLED):
        late = worker.stage is Stage.KILLED
        cause = reason(Code.TOOK_TOO_LONG, limit_s=turn.policy.spec.exit_timeout_s) if late else event.cause
        why = reason(Code.FAILED_LATE, cause, slot=worker.slot)
    if why and allows(view.state.phase, PhaseTrigger.WITHDRAWN):
        turn.do(PutState(after(view.state, PhaseTrigger.WITHDRAWN, why, turn.wall_s), view.state_revision))


def _lost_on_its_way(turn: Turn, worker: Worker) -> bool:
    """Whether the worker had state to bring into the generation of a planned change, and had not joined it yet. Its
    replacement may be all that is left there, with the state on a node that was left out: that generation is broken, so
    that the next one asks such nodes."""
    generation = turn.formed.generation
    return (
        generation is not None
        and generation.at_step is not None
        and 0 < worker.synced <= worker.generation < generation.number
    )


def ends_too_early(agent: Agent, slot: int, worker_id: int) -> bool:
    """Whether a script that ends now has failed even with exit code 0, since the job is not done."""
    worker, phase = agent.local.workers.get(slot), agent.etcd.view.state.phase
    over = agent.drain.leaving is not None or phase.over or phase is Phase.STOPPING
    there = (
        worker is not None
        and worker.worker_id == worker_id
        and worker.stage not in (Stage.GONE, Stage.KILLED, Stage.ABORTING)
    )
    return agent.policy.managed and there and not over


def failed(turn: Turn, event: WorkerFailed) -> None:
    """The script has ended with an error: report it now, so that other nodes need not wait for the process to end."""
    worker = turn.find(event.slot, event.worker_id)
    if worker is None or worker.stage in (Stage.GONE, Stage.KILLED, Stage.ABORTING) or turn.is_over():
        return
    worker = replace(worker, step=max(worker.step, event.step))
    turn.reaches(worker.synced, event.step)
    # The process ends by itself, or is killed if that takes too long: its exit is expected from here on.
    turn.move(replace(worker, crashes=worker.crashes + 1), Trigger.FAILED)
    if turn.policy.managed:
        promote(turn, worker.slot)
    _report_exit(turn, worker, event)


def _plain_exited(turn: Turn, worker: Worker, event: WorkerExited, expected: bool) -> None:
    if event.code == 0 and not expected:
        turn.move(worker, Trigger.COMPLETED_PLAIN)
        return
    turn.move(replace(worker, crashes=worker.crashes + (0 if expected else 1), lacks=""), Trigger.EXITED_PLAIN)
    if not expected:
        _report_exit(turn, worker, event)


def _struck_down(turn: Turn, worker: Worker, event: WorkerExited) -> bool:
    """Whether the worker died by a signal that its agent did not send, before or while it was told to end."""
    in_time = turn.now_s - worker.since_s < turn.policy.spec.stop_grace_s
    on_duty = worker.stage in IN_GROUP or (worker.told_to_end and in_time)
    return on_duty and event.signal not in ("", "SIGTERM")


def _report_at_the_end(turn: Turn, worker: Worker, event: WorkerExited) -> None:
    """The job was stopped just after the failure: nothing follows from it, but it goes on record."""
    generation = turn.formed.generation
    if generation is None or worker.generation != generation.number or worker.slot not in turn.my_ranks():
        return
    record = uncharged(worker_failure(turn, worker, "exit", event.cause))
    if turn.is_broken() and (earlier := turn.formed.broken_record) is not None:
        record = merged(earlier, record)
    turn.formed = replace(turn.formed, broken=generation.number, broken_record=record)
    turn.do(PutBroken(record))


def _report_fallen(turn: Turn, worker: Worker, event: WorkerExited) -> None:
    """The worker died while it aborted its group: killed together with the one that broke the generation, or because it
    did not abort in time. It does not count against the restart budget: one failure per generation does."""
    incident, killed = turn.incidents.incident, worker.stage is Stage.KILLED
    # On a node that was to leave: of the generation that runs on to the boundary, while the next one has just broken.
    left = None if killed else turn.formed.last_committed
    generations = (*(incident.generations if incident else ()), *((left,) if left else ()))
    formed = next((w for w in generations if w.number == worker.generation), None)
    if formed is None or formed.node_of(turn.policy.node, turn.policy.incarnation) is None:
        return
    reports = incident.reports if incident else ()
    if any(worker.slot in r.lost(turn.policy.node) for r in reports if r.generation == formed.number):
        return
    # One that a signal had stopped has failed by itself, as the one that was found first: all are named.
    late = "hang" if event.stopped else "respawn"
    kind, detail = (late, _late(event)) if killed else ("exit", event.cause)
    add_evidence(turn, _in_generation(turn, formed, uncharged(worker_failure(turn, worker, kind, detail))))


def _in_generation(turn: Turn, formed: GenerationRecord, record: BrokenRecord) -> BrokenRecord:
    """`record`, of one worker, as a report of the generation `formed`, which need not be the newest."""
    ranks = formed.ranks(turn.policy.node)
    return replace(record, generation=formed.number, ranks=tuple(ranks[slot] for slot in record.slots))


def _late(event: WorkerExited) -> Reason:
    return reason(Code.LATE_ABORT, reason(Code.STOPPED) if event.stopped else "")


def _report_exit(turn: Turn, worker: Worker, event: WorkerFailed) -> None:
    early = event.code == 0 and turn.policy.managed and not event.error
    detail = reason(Code.ENDED_EARLY) if early else event.cause
    record = worker_failure(turn, worker, "exit", detail)
    record = replace(record, fingerprint=event.fingerprint or str(event.cause), error=event.error)
    if worker.slot in turn.my_ranks():
        lines = event.last_lines if isinstance(event, WorkerExited) else ()
        report_failure(turn, replace(record, last_lines=lines))
        return
    _report_left_out(turn, worker, detail)
    workers = turn.local.workers
    if any(w.crashes >= workers[worker.slot].crashes for s, w in workers.items() if s != worker.slot):
        return  # all workers of a node meet the same failure before the first step: it counts once
    turn.etcd = replace(turn.etcd, uncounted=(*turn.etcd.uncounted, PendingFailure(record, turn.wall_s)))


def _report_left_out(turn: Turn, worker: Worker, detail: Text) -> None:
    """The worker died in the previous generation, which runs on to the step boundary of a planned change that leaves
    its slot without a rank: the agents that go on name it in the incident of that change. It is counted on its own."""
    last_committed, node = turn.formed.last_committed, turn.policy.node
    if last_committed is None or last_committed.number != worker.generation or worker.stage not in IN_GROUP:
        return
    if last_committed.node_of(node, turn.policy.incarnation) is None or worker.slot not in last_committed.ranks(node):
        return
    add_evidence(turn, _in_generation(turn, last_committed, uncharged(worker_failure(turn, worker, "exit", detail))))
    others = (w for slot, w in turn.local.workers.items() if slot != worker.slot)
    if not turn.my_ranks() and any(w.generation == last_committed.number and w.stage in HOLDS for w in others):
        report_failure(turn, uncharged(failure(turn, "boundary", reason(Code.AT_BOUNDARY))))
