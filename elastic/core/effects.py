"""What an agent can do about its job; the shell carries it out. See `recovery`."""

from __future__ import annotations

from dataclasses import dataclass

from .membership import Change
from .messages import ToWorker
from .records import BrokenRecord, GenerationRecord, IncidentRecord, JobState, MemberRecord, Phase, SpecRecord


@dataclass(frozen=True, slots=True)
class ForkWorker:
    slot: int
    worker_id: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class ForkPlain:
    """A worker that has not called `elastic.run`, and perhaps never will: forked straight into its rank."""

    slot: int
    worker_id: int
    generation: GenerationRecord


@dataclass(frozen=True, slots=True)
class Send:
    slot: int
    worker_id: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Kill:
    slot: int
    worker_id: int
    why: str
    graceful: bool = False
    """SIGTERM first, SIGKILL after the job's stop grace; else SIGKILL."""


@dataclass(frozen=True, slots=True)
class PutMember:
    record: MemberRecord


@dataclass(frozen=True, slots=True)
class PutBroken:
    """Where the generation has such a record already, what this one adds is merged into it: see `evidence`."""

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
    spare: int = 0
    """How many living nodes the job has beyond its least: with none, no node is set aside for what is charged."""
    managed: bool = False
    """Whether the job's workers are known to call `elastic.run`."""


@dataclass(frozen=True, slots=True)
class PutPhase:
    """Change the job's phase, if its state is still at `expect_revision`."""

    phase: Phase
    reason: str
    expect_revision: int


@dataclass(frozen=True, slots=True)
class PutIncident:
    """Write the record of an incident, replacing the one that was written when it began."""

    key: int
    """The number that it has in etcd: of the generation after the one that failed first."""
    record: IncidentRecord
    """Its instants are for the shell to fill in: `wall_s` is 0 unless it began before this agent did."""
    began_s: float
    """Monotonic instant from which its time line counts."""


@dataclass(frozen=True, slots=True)
class AddCauses:
    """Add to the record of an incident that is over what has been reported of its failures since."""

    key: int
    """As that of PutIncident."""
    record: IncidentRecord
    """As it would have been closed with these reports; its instants mean nothing."""


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
    | Send
    | Kill
    | PutMember
    | PutBroken
    | Publish
    | PutPhase
    | PutIncident
    | AddCauses
    | ChargeFailure
    | Restore
    | Rejoin
    | SaveNow
    | Leave
)
