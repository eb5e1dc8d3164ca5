"""Messages of workers as events of the state machine."""

from __future__ import annotations

from elastic.contract.worker import messages
from elastic.recovery.machine.events import (
    Event,
    WorkerBadNumbers,
    WorkerDone,
    WorkerFormed,
    WorkerGroupClosed,
    WorkerManaged,
    WorkerReady,
    WorkerStepping,
    WorkerSynced,
)


def to_event(slot: int, worker_id: int, message: messages.FromWorker) -> Event | None:
    """None for messages that do not concern the state machine."""
    match message:
        case messages.Managed():
            return WorkerManaged(slot, worker_id)
        case messages.Ready():
            return WorkerReady(slot, worker_id)
        case messages.Formed(generation=generation):
            return WorkerFormed(slot, worker_id, generation)
        case messages.Synced(generation=generation, step=at, origin=origin, source=source, reached=reached):
            return WorkerSynced(slot, worker_id, generation, at, origin, source, reached)
        case messages.Stepping(generation=generation, step=at):
            return WorkerStepping(slot, worker_id, generation, at)
        case messages.GroupClosed(generation=generation, step=at, between=between, clean=clean):
            return WorkerGroupClosed(slot, worker_id, generation, at, between=between, clean=clean)
        case messages.CollectiveFailed(generation=generation, step=at, error=said, altered=altered, clean=clean):
            error = said or "a collective failed"
            return WorkerGroupClosed(slot, worker_id, generation, at, error, altered, clean=clean)
        case messages.Done(generation=generation, step=at):
            return WorkerDone(slot, worker_id, generation, at)
        case messages.BadNumbers(generation=generation, step=at, kind=kind, detail=detail, ranks=ranks):
            return WorkerBadNumbers(slot, worker_id, generation, at, kind, detail, ranks)
    return None
