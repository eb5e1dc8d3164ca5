"""What one agent has seen of an incident. It alone writes it: when the incident begins, when it learns that more nodes
are gone, and when it is over. `incident_fold` makes the incident from all accounts and the failure reports."""

from __future__ import annotations

import enum

import msgspec

from elastic.contract.numbers import Int, Real, WallS
from elastic.contract.origin import Origin

from .job_records import BrokenRecord, Cause, Loss, Record, prepare
from .reasons import Text

COMM = "comm"
"""A collective failed, and no worker is known to be the cause."""

CONSEQUENCES = frozenset({COMM, "idle", "undrain", "boundary", "respawn", "no-state"})
"""Kinds of failures that follow from another one, or from none."""


def weight(kind: str) -> int:
    """Of two reports of one failure the heavier one names the cause."""
    if kind in CONSEQUENCES:
        return 0
    return 1 if kind == "drain" else 2


def kind_of(record: BrokenRecord) -> str:
    """The kind of a failure as an incident names it."""
    return "no-state" if record.no_state else record.kind


def spread(cause: BrokenRecord, found: BrokenRecord | Loss) -> bool:
    """Whether `found` is the loss that another rank's bad gradients of an earlier step, `cause`, have made."""
    return (
        cause.kind == found.kind == "bad loss"
        and cause.step is not None
        and found.step is not None
        and cause.step < found.step
    )


class Outcome(enum.StrEnum):
    OPEN = ""
    STEPPING = "stepping"
    GIVEN_UP = "given_up"


class Absence(msgspec.Struct, frozen=True, array_like=True):
    """A place that the next generation has not."""

    generation: Int
    node: str
    slots: tuple[Int, ...]
    back: bool = False
    """A later one has it again."""


class Sync(msgspec.Struct, frozen=True):
    """The state that one generation of the recovery resumed from."""

    generation: Int
    resumed: Int
    """The step it resumed from."""
    reached: Int
    """The newest step that was committed before, as far as is known."""
    origin: Origin
    source: str
    older: bool = False
    """Live state of a generation before that of the newest commit that is known: of a node that has come back."""


class Seen(Record, frozen=True, kw_only=True):
    """What an agent has seen of an incident."""

    first: Int
    """The generation that failed, or is replaced as planned: the first one of this incident as far as is known here."""
    stepped_in: Int = 0
    """The newest generation that was known to have stepped when it began."""
    repeat: Int = 0
    """How many false alarms of this generation this agent has seen end."""
    planned: bool = False
    why: Text = ""
    reached: tuple[Int, Int] = (0, 0)
    """(generation, step) of the newest commit that was known when it began."""
    noticed_wall_s: WallS = 0.0
    """By this node's clock."""
    still_s: Real = 0.0
    """For how long its own ranks had made no step by then; 0: they step on to a planned boundary, or made none in the
    generation that failed."""
    began_wall_s: WallS = 0.0
    """An estimate, if it began before this agent did; 0: when it was noticed."""
    left_wall_s: WallS = 0.0
    """When the previous agent of this node was last there, if it was when this began; 0: unknown."""
    gone: tuple[Cause, ...] = ()
    """Nodes that were lost or unreachable."""
    syncs: tuple[Sync, ...] = ()
    left: tuple[Int, ...] = ()
    """Generations that a rank of this node has left between two steps, in ascending order: no rank has committed a step
    that this one has not."""


class IncidentAccount(Seen, frozen=True, kw_only=True):
    by: str = ""
    """Whose it is: the incarnation of an agent."""
    last: Int
    """The newest generation: the one that steps, if the job has recovered."""
    outcome: Outcome = Outcome.OPEN
    stepped_on_at: tuple[Int, Int] = (0, 0)
    """The same when this was written."""
    counted: bool = True
    """The workers' steps are known: they use `elastic`."""
    witnessed: bool = True
    """This agent had a place in the first generation."""
    world_size_before: Int = 0
    world_size_after: Int = 0
    late_s_at_most: Real | None = None
    """How long it may have lasted at `noticed_wall_s`, by this node's monotonic clock: it did not begin before the last
    step that was seen here. None: there is no bound."""
    timeline_s: dict[str, Real] = msgspec.field(default_factory=dict)
    """Phase -> seconds since `noticed_wall_s`."""
    absent: tuple[Absence, ...] | None = None
    """None: there are too many, or not all generations are known."""
    all_stay: bool = False
    """All generations before the last are known here, and it has all of their places with all of their slots."""

    @property
    def failed(self) -> tuple[int, ...]:
        """The generations of which this tells a failure."""
        return self.first, *map(self.failed_in, self.gone)

    def failed_in(self, gone: Cause) -> int:
        """The generation that the recovery from this loss followed. In the one that has stepped since it was a false
        alarm, within the recovery."""
        stepped = self.outcome is Outcome.STEPPING and self.last > self.first
        return min(gone.generation, self.last - 1) if stepped else gone.generation


prepare(IncidentAccount)
