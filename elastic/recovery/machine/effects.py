"""The effects that an agent's recovery asks for; the effect runner carries them out. See `recovery`."""

from __future__ import annotations

import msgspec

from elastic.contract.records import job_records
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.reasons import Text
from elastic.contract.worker.messages import ToWorker
from elastic.recovery.facts.membership import Change


class Effect(msgspec.Struct, frozen=True):
    pass


class ForkWorker(Effect, frozen=True):
    slot: int
    worker_id: int
    standby: bool = False


class ForkPlain(Effect, frozen=True):
    """Fork a worker that has not called `elastic.run`, and perhaps never will, directly with its rank."""

    slot: int
    worker_id: int
    generation: job_records.GenerationRecord


class Send(Effect, frozen=True):
    slot: int
    worker_id: int
    message: ToWorker


class Kill(Effect, frozen=True):
    slot: int
    worker_id: int
    why: Text
    graceful: bool = False
    """SIGTERM first, SIGKILL after the job's stop grace; else SIGKILL."""


class PutMember(Effect, frozen=True):
    record: job_records.MemberRecord


class PutBroken(Effect, frozen=True):
    """Write a failure report. If the generation has one already, this one is merged into it: see `evidence`."""

    record: job_records.BrokenRecord
    member: job_records.MemberRecord | None = None
    """Our member record, changed in the same transaction (`shrink`: the dead slot is withdrawn)."""


class Publish(Effect, frozen=True):
    """Open a store, then write generation `number` by compare-and-swap on `expect_revision` (0: absent)."""

    number: int
    change: Change
    expect_revision: int
    at_step: int | None
    state: job_records.JobState | None
    """The job's state, to be written in the same transaction; None: it does not change."""
    charged: bool = False
    """Whether `state` counts a failure against the job's restart budget."""
    managed: bool = False
    """Whether the job's workers are known to call `elastic.run`."""


class FindNewestSaved(Effect, frozen=True):
    """Look for the newest checkpoint of the job, which the event `NewestSaved` tells."""

    remote: bool
    """At the remote end, too."""


class PutState(Effect, frozen=True):
    """Replace the job's state, if it is still at `expect_revision`: another phase, or a failure counted."""

    state: job_records.JobState
    expect_revision: int


class PutIncident(Effect, frozen=True):
    """Write this agent's account of an incident, in place of the one that it wrote when that began."""

    account: IncidentAccount
    reports: tuple[job_records.BrokenRecord, ...] = ()
    """The failure reports of it that are known here."""

    @property
    def record(self) -> job_records.IncidentRecord:
        """The incident as it is known here."""
        return incidents([self.account], self.reports)[-1]


class Restore(Effect, frozen=True):
    """etcd was wiped: write spec, state and generation back where they are absent."""

    generation: job_records.GenerationRecord | None
    state: job_records.JobState
    spec: job_records.SpecRecord | None
    """None: none was ever seen; the effect runner has the one that the agent was started with."""


class Rejoin(Effect, frozen=True):
    """Obtain a new lease and put our member record under it."""

    record: job_records.MemberRecord


class SaveNow(Effect, frozen=True):
    reason: Text
    stop: bool = False
    """All ranks stop at the step that is saved."""


class Leave(Effect, frozen=True):
    """All workers have ended: delete our member key and exit."""

    reason: Text
    code: int = 0
