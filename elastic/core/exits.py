"""A worker's end: who takes its place, after what pause, and whether it is charged."""

from __future__ import annotations

from msgspec.structs import replace

from .announce import broken_record, call_broken
from .effects import ChargeFailure
from .events import WorkerExited
from .model import Stage, Worker
from .restarts import backoff_s, summary
from .standbys import promote
from .turn import Turn


def exited(turn: Turn, event: WorkerExited) -> None:
    if standby := turn.standby(event.life):
        pause = backoff_s(standby.crashes + 1, turn.policy.spec.restarts, turn.jitter)
        gone = replace(standby, stage=Stage.GONE, deadline_s=turn.now_s + pause, crashes=standby.crashes + 1)
        turn.change(standbys=tuple(gone if w.life == event.life else w for w in turn.agent.standbys))
        return  # charged to no budget
    worker = turn.find(event.slot, event.life)
    if worker is None or worker.stage is Stage.GONE:
        return
    worker = replace(worker, step=max(worker.step, event.step))
    expected = worker.stage in (Stage.KILLED, Stage.LEAVING) or turn.is_over()
    if not turn.policy.managed:
        _plain_exited(turn, worker, event, expected)
        return
    crashes = worker.crashes + (0 if expected else 1)
    pause = backoff_s(crashes, turn.policy.spec.restarts, turn.jitter)
    turn.move(worker, Stage.GONE, turn.now_s + pause, crashes=crashes)
    promote(turn, worker.slot)
    if not expected:
        _report_exit(turn, worker, event)
    elif turn.policy.shrink and worker.slot in turn.my_ranks() and not turn.is_broken():
        call_broken(turn, "respawn", "did not let go in time", (worker.slot,), step=worker.step, charged=False)


def _plain_exited(turn: Turn, worker: Worker, event: WorkerExited, expected: bool) -> None:
    if event.code == 0 and not expected:
        turn.move(worker, Stage.DONE)
        return
    turn.move(worker, Stage.READY, crashes=worker.crashes + (0 if expected else 1))
    if not expected:
        _report_exit(turn, worker, event)


def _report_exit(turn: Turn, worker: Worker, event: WorkerExited) -> None:
    detail = summary(event.error.message) if event.error else event.cause
    if event.code == 0 and turn.policy.managed:
        detail = "exited with code 0 before the job was done"
    fingerprint = event.fingerprint or event.cause
    if worker.slot in turn.my_ranks():
        call_broken(turn, "exit", detail, (worker.slot,), step=worker.step, fingerprint=fingerprint, error=event.error)
        return
    workers = turn.agent.workers
    if any(w.crashes >= workers[worker.slot].crashes for s, w in workers.items() if s != worker.slot):
        return  # what one worker of a node meets before the first step, all of them do: that is one failure
    record = broken_record(
        turn,
        turn.agent.generation.number if turn.agent.generation else 0,
        "exit",
        detail,
        (worker.slot,),
        step=worker.step,
        fingerprint=fingerprint,
        error=event.error,
    )
    turn.do(ChargeFailure(record))
