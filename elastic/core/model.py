"""The values that an agent's recovery works on: its workers, what can happen, what it may do. See `recovery`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .membership import Change, Dead, JobView, Limits
from .messages import ToWorker
from .records import BrokenRecord, GenerationRecord, JobState, MemberRecord, Phase, SpecRecord, WorkerError
from .spec import JobSpec
from .timeouts import Timeouts


class Stage(enum.Enum):
    """Where a worker stands, as its agent knows it."""

    STARTING = "starting"  # forked; imports and setup
    READY = "ready"  # holds process (and perhaps state), no group
    FORMING = "forming"  # told to form `generation`
    RUNNING = "running"  # state is there, `train` runs
    YIELDING = "yielding"  # told to leave at a step
    LEAVING = "leaving"  # told to let go
    KILLED = "killed"  # SIGKILL sent, exit not yet seen
    DONE = "done"  # `train` has returned on all ranks
    GONE = "gone"  # no process; one is due at `deadline_s`


IN_GROUP = frozenset({Stage.FORMING, Stage.RUNNING, Stage.YIELDING, Stage.DONE})


@dataclass(frozen=True, slots=True)
class Worker:
    slot: int
    life: int
    """Unique per process in this agent's life."""
    stage: Stage
    generation: int = 0
    """The newest generation it was told to form."""
    since_s: float = 0.0
    deadline_s: float = float("inf")
    step: int = 0
    crashes: int = 0
    """Deaths of this slot since it last committed a step."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What of the job's spec and the node's settings decides about recovery."""

    node: str
    incarnation: str
    host: str
    port: int
    slots: int
    limits: Limits
    shrink: bool
    standbys: int
    managed: bool
    """The script uses `elastic` and survives a re-formation; otherwise its workers are replaced each time."""
    spec: JobSpec
    timeouts: Timeouts


@dataclass(frozen=True, slots=True)
class Agent:
    policy: Policy
    view: JobView = field(default_factory=JobView)
    joined: bool = False
    connected: bool = False
    generation: GenerationRecord | None = None
    """The newest this agent knows; outlives etcd."""
    broken: int = 0
    """The newest generation known to be broken."""
    broken_record: BrokenRecord | None = None
    """Who said so, and why; outlives etcd."""
    state: JobState = field(default_factory=JobState)
    """The newest that etcd has shown; outlives etcd."""
    spec: SpecRecord | None = None
    """The newest that etcd has shown; outlives etcd."""
    blind_until_s: float = float("-inf")
    """etcd was wiped or away: until then, who is absent may only not have come back to it yet."""
    wiped_until_s: float = float("-inf")
    """etcd has lost its data: until then, somebody may still come with a newer generation than stands there."""
    orphaned_s: float | None = None
    """Since when nobody of the generation can be heard of."""
    dead: Dead = frozenset()
    dead_since_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    workers: Mapping[int, Worker] = field(default_factory=dict)
    standbys: tuple[Worker, ...] = ()
    lives: int = 0
    published: MemberRecord | None = None
    publishing: int = 0
    """Number of the generation whose compare-and-swap is under way; 0 = none."""
    min_reached_s: float | None = None
    step: int = 0
    step_s: float = 0.0
    stepped_at_s: float = float("-inf")
    settled: int = 0
    """The newest generation in which a local worker has committed a step."""
    suspicious_since_s: float | None = None
    """A collective failed here and nobody said why yet."""
    suspicion: str = ""
    draining: str | None = None
    drain_deadline_s: float = float("inf")
    drain_saved: int = 0
    """The newest step that a checkpoint has made durable since the drain was ordered."""
    leaving: str | None = None
    reason: str = ""
    """Why the agent waits, for people."""
    below_min: bool = False
    asked: Mapping[str, float] = field(default_factory=dict)
    """What was asked for and is not confirmed yet, and when."""


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


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
class WorkerReady:
    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class WorkerFormed:
    slot: int
    life: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerSynced:
    slot: int
    life: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class WorkerStepping:
    slot: int
    life: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    slot: int
    life: int
    generation: int
    step: int
    error: str = ""
    """Set when nobody had told it to: a collective failed there."""


@dataclass(frozen=True, slots=True)
class WorkerDone:
    slot: int
    life: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    slot: int
    life: int
    cause: str
    """'signal SIGKILL', 'exit code 1', …"""
    code: int | None = None
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int = 0
    """The last it had committed, from its beat page."""


@dataclass(frozen=True, slots=True)
class WorkerSick:
    """Found hung; its stacks are already saved."""

    slot: int
    life: int
    kind: str
    evidence: str


@dataclass(frozen=True, slots=True)
class StillBusy:
    """It was told to let go, and has declared a span without steps: it cannot hear, and is not stuck."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class NumbersBad:
    slot: int
    life: int
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
class Progress:
    """The newest step committed by a local worker, as its beat page shows it."""

    generation: int
    step: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Undrain:
    pass


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of this job has become durable."""

    step: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Start
    | Joined
    | LeaseLost
    | Viewed
    | PublishFailed
    | WorkerReady
    | WorkerFormed
    | WorkerSynced
    | WorkerStepping
    | WorkerReleased
    | WorkerDone
    | WorkerExited
    | WorkerSick
    | StillBusy
    | NumbersBad
    | PeerDead
    | Progress
    | Drain
    | Undrain
    | Saved
    | Tick
)


# ── effects ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ForkWorker:
    slot: int
    life: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class ForkPlain:
    """A script that knows nothing of elastic: forked straight into its rank."""

    slot: int
    life: int
    generation: GenerationRecord


@dataclass(frozen=True, slots=True)
class Tell:
    slot: int
    life: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Kill:
    slot: int
    life: int
    why: str
    gently: bool = False
    """SIGTERM first, SIGKILL after the job's stop grace; else SIGKILL."""


@dataclass(frozen=True, slots=True)
class PutMember:
    record: MemberRecord


@dataclass(frozen=True, slots=True)
class PutBroken:
    """Unless the generation has such a record already."""

    record: BrokenRecord
    member: MemberRecord | None = None
    """Our member record, changed in the same transaction (`shrink`: the dead slot is withdrawn)."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Open a store, then write generation `number` by compare-and-swap on `expect_revision` (0: absent)."""

    number: int
    change: Change
    expect_revision: int
    at_step: int | None
    charge: BrokenRecord | None
    """The failure to book on the job's budget in the same transaction."""


@dataclass(frozen=True, slots=True)
class PutPhase:
    """Change the job's phase, if its state is still at `expect_revision`."""

    phase: Phase
    reason: str
    expect_revision: int


@dataclass(frozen=True, slots=True)
class ChargeFailure:
    """A failure outside any generation (a worker that cannot even start): book it on the job's budget."""

    record: BrokenRecord


@dataclass(frozen=True, slots=True)
class Restore:
    """etcd was wiped: write spec, state and generation back where they are absent."""

    generation: GenerationRecord | None
    state: JobState
    spec: SpecRecord | None
    """None: none was ever seen; the shell knows the one it was started with."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Get a new lease and put our member record under it."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class SaveNow:
    reason: str
    stop: bool = False
    """The world stops at the step that is saved."""


@dataclass(frozen=True, slots=True)
class Leave:
    """All workers are gone: delete our member key and end."""

    reason: str
    code: int = 0


Effect = (
    ForkWorker
    | ForkPlain
    | Tell
    | Kill
    | PutMember
    | PutBroken
    | Publish
    | PutPhase
    | ChargeFailure
    | Restore
    | Rejoin
    | SaveNow
    | Leave
)
