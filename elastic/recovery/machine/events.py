"""The events that an agent's recovery reacts to. See `recovery`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.contract.records.job_records import WorkerError
from elastic.contract.records.reasons import Text
from elastic.contract.records.standings import Standing
from elastic.contract.worker.messages import FromWorker
from elastic.recovery.facts.view import JobView


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class Joined:
    """Our member key is in etcd, under a valid lease."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    why: str


@dataclass(frozen=True, slots=True)
class Viewed:
    view: JobView
    connected: bool


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The compare-and-swap failed, or its outcome is unknown; the view will show it."""

    number: int


@dataclass(frozen=True, slots=True)
class NewestSaved:
    """What `FindNewestSaved` has found."""

    generation: int
    """That of the newest checkpoint, finished or not; 0: there is none."""
    remote: bool = False
    """The remote end counts."""
    error: str = ""
    """Why it is not known; '' when it is."""


@dataclass(frozen=True, slots=True)
class StoreClosed:
    """The store of a generation, which this agent hosted, had grown beyond its limit."""

    generation: int
    why: Text


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Of one worker. Its id is there so that a process is not taken for its successor."""

    slot: int
    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerStarted(WorkerEvent):
    """Its process runs: it was ordered before, and its zygote may have had to import first."""


@dataclass(frozen=True, slots=True)
class WorkerSaid(WorkerEvent):
    """A message of the worker that the agent's state depends on."""

    message: FromWorker


@dataclass(frozen=True, slots=True)
class WorkerFailed(WorkerEvent):
    """Its script has ended with an error, and its process is about to end."""

    cause: Text
    code: int
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int = 0
    """The last step that it committed, from its beat page."""


@dataclass(frozen=True, slots=True)
class WorkerExited(WorkerEvent):
    cause: Text
    """How it ended, or the exception."""
    code: int | None = None
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int = 0
    """The last step that it committed, from its beat page."""
    last_lines: tuple[str, ...] = ()
    """Of its log, if it was killed by a signal: it has left no `error` then."""
    signal: str = ""
    """That killed it: 'SIGKILL', …"""
    stopped: bool = False
    """A signal had stopped it when its agent killed it."""
    shortage: bool = False
    """It was never started: the node lacks descriptors, processes, memory or disk space for it."""


@dataclass(frozen=True, slots=True)
class WorkerUnhealthy(WorkerEvent):
    """The worker was found to be hung; its stacks are dumped already."""

    kind: str
    evidence: Text
    stacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupStuck(WorkerEvent):
    """The worker has waited for other ranks for longer than the group's timeout; none of them was found to be hung."""

    evidence: Text


@dataclass(frozen=True, slots=True)
class StillBusy(WorkerEvent):
    """The worker was told to abort, and cannot react yet but is healthy: see `hang_rules.busy`."""


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Another agent is dead: its port refuses connections."""

    node: str
    incarnation: str
    evidence: str


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """Another agent does not answer this one any more; it may be alive, and other agents may reach it."""

    node: str
    incarnation: str
    evidence: str


@dataclass(frozen=True, slots=True)
class PeerReachable:
    """The agent answers again, and has done so for a while."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest step committed by a local worker, as its beat page shows it; comes in place of a Tick."""

    generation: int
    step: int
    step_s: float


@dataclass(frozen=True, slots=True)
class RanksStill:
    """Local workers show no progress: how far each has got, to be published to the other agents."""

    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    reason: Text
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Undrain:
    pass


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint of this job has become durable."""

    generation: int
    """In which its step was committed."""
    step: int


@dataclass(frozen=True, slots=True)
class Saving:
    """Whether snapshots that local workers have handed over are still on their way to disk, and get on."""

    saving: bool


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Start
    | Joined
    | LeaseLost
    | Viewed
    | PublishFailed
    | NewestSaved
    | WorkerEvent
    | PeerDead
    | PeerUnreachable
    | PeerReachable
    | Progress
    | RanksStill
    | Drain
    | Undrain
    | StoreClosed
    | CheckpointSaved
    | Saving
    | Tick
)
