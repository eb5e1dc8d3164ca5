"""The effects that an agent's recovery asks for; the effect runner carries them out. See `recovery`."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    SpecRecord,
)
from elastic.contract.records.reasons import Text
from elastic.contract.worker.messages import ToWorker
from elastic.recovery.facts.membership import Change


@dataclass(frozen=True, slots=True)
class ForkWorker:
    slot: int
    worker_id: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class ForkPlain:
    """Fork a worker that has not called `elastic.run`, and perhaps never will, directly with its rank."""

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
    why: Text
    graceful: bool = False
    """SIGTERM first, SIGKILL after the job's stop grace; else SIGKILL."""


@dataclass(frozen=True, slots=True)
class PutMember:
    record: MemberRecord


@dataclass(frozen=True, slots=True)
class PutBroken:
    """Write a failure report. If the generation has one already, this one is merged into it: see `evidence`."""

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
    state: JobState | None
    """The job's state, to be written in the same transaction; None: it does not change."""
    charged: bool = False
    """Whether `state` counts a failure against the job's restart budget."""
    managed: bool = False
    """Whether the job's workers are known to call `elastic.run`."""


@dataclass(frozen=True, slots=True)
class FindNewestSaved:
    """Look for the newest checkpoint of the job, which the event `NewestSaved` tells."""

    remote: bool
    """At the remote end, too."""


@dataclass(frozen=True, slots=True)
class PutState:
    """Replace the job's state, if it is still at `expect_revision`: another phase, or a failure counted."""

    state: JobState
    expect_revision: int


@dataclass(frozen=True, slots=True)
class PutIncident:
    """Write this agent's account of an incident, in place of the one that it wrote when that began."""

    account: IncidentAccount
    reports: tuple[BrokenRecord, ...] = ()
    """The failure reports of it that are known here."""

    @property
    def record(self) -> IncidentRecord:
        """The incident as it is known here."""
        return incidents([self.account], self.reports)[-1]


@dataclass(frozen=True, slots=True)
class Restore:
    """etcd was wiped: write spec, state and generation back where they are absent."""

    generation: GenerationRecord | None
    state: JobState
    spec: SpecRecord | None
    """None: none was ever seen; the effect runner has the one that the agent was started with."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Obtain a new lease and put our member record under it."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class SaveNow:
    reason: Text
    stop: bool = False
    """All ranks stop at the step that is saved."""


@dataclass(frozen=True, slots=True)
class Leave:
    """All workers have ended: delete our member key and exit."""

    reason: Text
    code: int = 0


Effect = (
    ForkWorker
    | ForkPlain
    | Send
    | Kill
    | PutMember
    | PutBroken
    | Publish
    | FindNewestSaved
    | PutState
    | PutIncident
    | Restore
    | Rejoin
    | SaveNow
    | Leave
)
