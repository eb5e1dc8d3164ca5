"""What a worker says to its agent, as events of the recovery machine."""

from __future__ import annotations

from elastic.contract.origin import Origin
from elastic.contract.worker import messages
from elastic.recovery.machine.events import WorkerSaid


def managed(slot: int, worker_id: int) -> WorkerSaid:
    return WorkerSaid(slot, worker_id, messages.Managed())


def ready(slot: int, worker_id: int) -> WorkerSaid:
    return WorkerSaid(slot, worker_id, messages.Ready())


def formed(slot: int, worker_id: int, generation: int) -> WorkerSaid:
    return WorkerSaid(slot, worker_id, messages.Formed(generation=generation))


def synced(
    slot: int,
    worker_id: int,
    generation: int,
    step: int,
    origin: Origin = Origin.LIVE,
    source: str = "live",
    reached: int = 0,
) -> WorkerSaid:
    message = messages.Synced(generation=generation, step=step, origin=origin, source=source, reached=reached)
    return WorkerSaid(slot, worker_id, message)


def stepping(slot: int, worker_id: int, generation: int, step: int) -> WorkerSaid:
    return WorkerSaid(slot, worker_id, messages.Stepping(generation=generation, step=step))


def group_closed(
    slot: int,
    worker_id: int,
    generation: int,
    step: int,
    error: str = "",
    altered: str = "",
    *,
    between: bool = False,
    clean: bool = True,
    stepless_s: float | None = None,
) -> WorkerSaid:
    """With `error` or `altered`: a collective has failed there."""
    message: messages.GroupClosed | messages.CollectiveFailed
    if error or altered:
        message = messages.CollectiveFailed(
            generation=generation, step=step, clean=clean, error=error, altered=altered, stepless_s=stepless_s
        )
    else:
        message = messages.GroupClosed(
            generation=generation, step=step, clean=clean, between=between, stepless_s=stepless_s
        )
    return WorkerSaid(slot, worker_id, message)


def done(slot: int, worker_id: int, generation: int, step: int) -> WorkerSaid:
    return WorkerSaid(slot, worker_id, messages.Done(generation=generation, step=step))


def bad_numbers(
    slot: int, worker_id: int, generation: int, step: int, kind: str, detail: str, ranks: tuple[int, ...]
) -> WorkerSaid:
    message = messages.BadNumbers(generation=generation, step=step, kind=kind, detail=detail, ranks=ranks)
    return WorkerSaid(slot, worker_id, message)
