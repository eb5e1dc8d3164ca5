"""What can happen to an agent's job. See `recovery`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .records import Standing, WorkerError
from .view import JobView


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class Joined:
    """Our member key stands, under a living lease."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    why: str


@dataclass(frozen=True, slots=True)
class Viewed:
    view: JobView
    connected: bool


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The compare-and-swap was lost, or its outcome is unknown; the view will tell."""

    number: int


@dataclass(frozen=True, slots=True)
class WorkerManaged:
    """Its script has called `elastic.run`."""

    slot: int
    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    slot: int
    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerFormed:
    slot: int
    worker_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerSynced:
    slot: int
    worker_id: int
    generation: int
    step: int
    source: str = "live"
    """See messages.Synced."""
    reached: int = 0
    """The newest step that any rank of the generation knows to have been committed before it."""


@dataclass(frozen=True, slots=True)
class WorkerStepping:
    slot: int
    worker_id: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class WorkerGroupClosed:
    slot: int
    worker_id: int
    generation: int
    step: int
    error: str = ""
    """Set when nobody had told it to: a collective failed there."""


@dataclass(frozen=True, slots=True)
class WorkerDone:
    slot: int
    worker_id: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Its script has ended with an error, and its process is about to end."""

    slot: int
    worker_id: int
    cause: str
    code: int
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int = 0
    """The last it had committed, from its beat page."""


@dataclass(frozen=True, slots=True)
class WorkerExited:
    slot: int
    worker_id: int
    cause: str
    """'signal SIGKILL', 'exit code 1', …"""
    code: int | None = None
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int = 0
    """The last it had committed, from its beat page."""


@dataclass(frozen=True, slots=True)
class WorkerUnhealthy:
    """Found hung; its stacks are already saved."""

    slot: int
    worker_id: int
    kind: str
    evidence: str
    stacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupStuck:
    """It has waited for other ranks for longer than a group may; none of them was found hung."""

    slot: int
    worker_id: int
    evidence: str


@dataclass(frozen=True, slots=True)
class StillBusy:
    """It was told to let go, and has declared a span without steps: it cannot hear, and is not stuck."""

    slot: int
    worker_id: int


@dataclass(frozen=True, slots=True)
class WorkerBadNumbers:
    slot: int
    worker_id: int
    generation: int
    step: int
    kind: str
    detail: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Another agent is dead for certain: its port refuses connections."""

    node: str
    incarnation: str
    evidence: str


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """Another agent does not answer us any more; it may live, and others may reach it."""

    node: str
    incarnation: str
    evidence: str


@dataclass(frozen=True, slots=True)
class PeerReachable:
    """It answers us again, and has done so for a while."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest step committed by a local worker, as its beat page shows it; comes in the place of a Tick."""

    generation: int
    step: int
    step_s: float


@dataclass(frozen=True, slots=True)
class RanksStill:
    """Local workers show no progress: the other agents are to know how far each has got."""

    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Undrain:
    pass


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint of this job has become durable."""

    step: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


WorkerEvent = (
    WorkerManaged
    | WorkerReady
    | WorkerFormed
    | WorkerSynced
    | WorkerStepping
    | WorkerGroupClosed
    | WorkerDone
    | WorkerFailed
    | WorkerExited
    | WorkerUnhealthy
    | GroupStuck
    | StillBusy
    | WorkerBadNumbers
)
"""Of one worker: `slot`, and `life`, so that what a process has said is not taken for the word of its successor."""

Event = (
    Start
    | Joined
    | LeaseLost
    | Viewed
    | PublishFailed
    | WorkerEvent
    | PeerDead
    | PeerUnreachable
    | PeerReachable
    | Progress
    | RanksStill
    | Drain
    | Undrain
    | CheckpointSaved
    | Tick
)
