"""What a worker says, as an event of the machine."""

from __future__ import annotations

from ..core import messages
from ..core.events import (
    Event,
    NumbersBad,
    WorkerDone,
    WorkerFormed,
    WorkerManaged,
    WorkerReady,
    WorkerReleased,
    WorkerStepping,
    WorkerSynced,
)


def as_event(slot: int, life: int, message: messages.FromWorker) -> Event | None:
    """None for what does not concern the machine."""
    match message:
        case messages.Managed():
            return WorkerManaged(slot, life)
        case messages.Ready():
            return WorkerReady(slot, life)
        case messages.Formed(generation=generation):
            return WorkerFormed(slot, life, generation)
        case messages.Synced(generation=generation, step=at, source=source, reached=reached):
            return WorkerSynced(slot, life, generation, at, source, reached)
        case messages.Stepping(generation=generation, step=at):
            return WorkerStepping(slot, life, generation, at)
        case messages.Released(generation=generation, step=at):
            return WorkerReleased(slot, life, generation, at)
        case messages.CommFailed(generation=generation, step=at, error=error):
            return WorkerReleased(slot, life, generation, at, error or "a collective failed")
        case messages.Done(generation=generation, step=at):
            return WorkerDone(slot, life, generation, at)
        case messages.BadNumbers(generation=generation, step=at, kind=kind, detail=detail, ranks=ranks):
            return NumbersBad(slot, life, generation, at, kind, detail, ranks)
    return None
