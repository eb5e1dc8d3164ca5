"""The events that an agent's recovery reacts to. See `recovery`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from elastic.contract.records.job_records import WorkerError
from elastic.contract.records.reasons import Text
from elastic.contract.records.standings import Standing
from elastic.contract.worker import messages
from elastic.recovery.facts.view import JobView


class Event(msgspec.Struct, frozen=True):
    pass


class Start(Event, frozen=True):
    pass


class Joined(Event, frozen=True):
    """Our member key is in etcd, under a valid lease."""


class LeaseLost(Event, frozen=True):
    why: str


class Viewed(Event, frozen=True):
    view: JobView
    connected: bool


class PublishFailed(Event, frozen=True):
    """The compare-and-swap failed, or its outcome is unknown; the view will show it."""

    number: int


class NewestSaved(Event, frozen=True):
    """What `FindNewestSaved` has found."""

    generation: int
    """That of the newest checkpoint, finished or not; 0: there is none."""
    remote: bool = False
    """The remote end counts."""
    error: str = ""
    """Why it is not known; '' when it is."""


class StoreClosed(Event, frozen=True):
    """The store of a generation, which this agent hosted, had grown beyond its limit."""

    generation: int
    why: Text


class WorkerEvent(Event, frozen=True):
    """Of one worker. Its id is there so that a process is not taken for its successor."""

    slot: int
    worker_id: int


class WorkerStarted(WorkerEvent, frozen=True):
    """Its process runs: it was ordered before, and its zygote may have had to import first."""


class WorkerSaid(WorkerEvent, frozen=True):
    """A message of the worker that the agent's state depends on."""

    message: messages.FromWorker


ENTERING = (messages.Formed, messages.Synced, messages.Stepping)
"""What workers say on their way into a group. Nothing is told to them for one of these alone."""


class WorkersEnter(Event, frozen=True):
    """Such messages that have come together, oldest first: one turn for all."""

    said: tuple[WorkerSaid, ...]


class WorkerFailed(WorkerEvent, frozen=True):
    """Its script has ended with an error, and its process is about to end."""

    cause: Text
    """How it ended, or the exception."""
    code: int | None = None
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int = 0
    """The last step that it committed, from its beat page."""


class WorkerExited(WorkerFailed, frozen=True):
    """Its process has ended."""

    last_lines: tuple[str, ...] = ()
    """Of its log, if it was killed by a signal: it has left no `error` then."""
    signal: str = ""
    """That killed it: 'SIGKILL', …"""
    stopped: bool = False
    """A signal had stopped it when its agent killed it."""
    shortage: bool = False
    """It was never started: the node lacks descriptors, processes, memory or disk space for it."""
    undone: bool = False
    """Its script has not come to its end: it failed, was killed from outside, or took too long for it."""


class WorkerUnhealthy(WorkerEvent, frozen=True):
    """The worker was found to be hung; its stacks are dumped already."""

    kind: str
    evidence: Text
    stacks: Mapping[str, str] = {}


class GroupStuck(WorkerEvent, frozen=True):
    """The worker has waited for other ranks for longer than the group's timeout; none of them was found to be hung."""

    evidence: Text


class StillBusy(WorkerEvent, frozen=True):
    """The worker was told to abort, and cannot react yet but is healthy: see `hang_rules.busy`."""


class PeerEvent(Event, frozen=True):
    """Of another agent."""

    node: str
    incarnation: str
    evidence: str = ""


class PeerDead(PeerEvent, frozen=True):
    """Its port refuses connections."""


class PeerUnreachable(PeerEvent, frozen=True):
    """It does not answer this agent any more; it may be alive, and other agents may reach it."""


class PeerReachable(PeerEvent, frozen=True):
    """It answers again, and has done so for a while."""


class Progress(Event, frozen=True):
    """The newest step committed by a local worker, as its beat page shows it; comes in place of a Tick."""

    generation: int
    step: int
    step_s: float


class RanksStill(Event, frozen=True):
    """Local workers show no progress: how far each has got, to be published to the other agents."""

    standings: tuple[Standing, ...]


class Drain(Event, frozen=True):
    reason: Text
    deadline_s: float


class Undrain(Event, frozen=True):
    pass


class CheckpointSaved(Event, frozen=True):
    """A checkpoint of this job has become durable."""

    generation: int
    """In which its step was committed."""
    step: int


class Saving(Event, frozen=True):
    """Whether snapshots that local workers have handed over are still on their way to disk, and get on."""

    saving: bool


class Tick(Event, frozen=True):
    pass
