"""What stands in etcd: one frozen struct per key, JSON on the wire, each with the protocol it speaks.

Times called ``*_wall_s`` are seconds since 1970 for people to read; nothing is decided by them.
"""

from __future__ import annotations

import enum
import operator
from functools import cached_property
from typing import Any, TypeVar, cast

import msgspec

from .spec import JobSpec

PROTOCOL = 2
"""Version of every record and message. A reader that finds another one stays out and says so."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int = PROTOCOL


class ProtocolVersionMismatch(Exception):
    """A record was written by a version that this one does not understand."""

    def __init__(self, kind: str, theirs: int) -> None:
        super().__init__(
            f"{kind} speaks protocol {theirs}, this elasticd speaks {PROTOCOL}: "
            f"run the same elasticd version on every node of the cluster"
        )
        self.theirs = theirs


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """A worker process on a node, as its daemon shows it to the others: what changes only when it is replaced."""

    job: str
    slot: int
    pid: int
    incarnation: int
    """How many workers this slot has had before, in its agent's life."""


class NodeRecord(Record, frozen=True, kw_only=True):
    node: str
    hostname: str
    address: str
    """Where other nodes reach this one."""
    slots: int
    """Workers this node can hold: its GPUs, or its CPU slots."""
    gpus: int
    version: str
    pid: int
    started_wall_s: float
    draining: str | None = None
    """Why the node is being emptied, or None."""
    healthy: bool = True
    reason: str | None = None
    """Why the node takes no work, when it is not healthy."""
    workers: tuple[WorkerRow, ...] = ()
    """For people who ask another node; a few seconds old."""


class CordonRecord(Record, frozen=True, kw_only=True):
    reason: str
    since_wall_s: float


class DrainRecord(Record, frozen=True, kw_only=True):
    """A person wants the node emptied. Its daemon passes this on to its agents; the node takes no new work."""

    reason: str
    deadline_s: float = 0.0
    """Seconds, from when the node's daemon sees this, until the node goes away whatever happens; 0: no deadline."""
    since_wall_s: float


class AskedRecord(Record, frozen=True, kw_only=True):
    """What a person asked of a running job."""

    checkpoint: int = 0
    """Counts requests for a checkpoint; see AgentOrders."""


class SpecRecord(Record, frozen=True, kw_only=True):
    spec: JobSpec
    submitted_wall_s: float
    submitted_by: str


class Phase(enum.StrEnum):
    PENDING = "pending"  # not enough nodes yet, never formed
    RUNNING = "running"
    WAITING = "waiting"  # formed before; now below min nodes, state kept
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


class WorkerError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker ended, as far as it could say: from torch's error file, else from its exit status."""

    node: str
    slot: int
    rank: int
    message: str
    traceback: str = ""
    exit_code: int | None = None
    signal: str | None = None
    step: int | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure charged to the job's budget."""

    wall_s: float
    generation: int
    node: str
    fingerprint: str
    """What makes two failures the same: exception type and place, or the signal; see `restarts`."""
    step: int | None = None
    slots: tuple[int, ...] = ()
    """Of the workers that failed, on `node`."""


class JobState(Record, frozen=True, kw_only=True):
    phase: Phase = Phase.PENDING
    reason: str = ""
    since_wall_s: float = 0.0
    restarts: int = 0
    """Failures charged over the job's whole life."""
    failures: tuple[Failure, ...] = ()
    """Those still inside the sliding window, oldest first."""
    error: WorkerError | None = None
    """The first failing rank of the newest failure."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes set aside for this job because its workers die there more often than elsewhere."""


class Standing(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How far a rank has got that shows no progress, as its own agent sees it."""

    rank: int
    position: tuple[int, int, int]
    """See `health.Position`."""
    doing: str
    silent_s: float
    """Since its last sign of progress, when this was written."""
    gap_s: float = 0.0
    """The longest time without one that it took on the way there."""
    waits: bool = False
    """For other ranks."""
    stopped: bool = False
    """Its process is stopped by a signal."""
    deaf: bool = False
    """No thread of it runs Python."""
    quiet: bool = False
    """It has declared a span without steps."""


class MemberRecord(Record, frozen=True, kw_only=True):
    """An agent that takes part, or would. Leased: gone when the agent is."""

    node: str
    incarnation: str
    """Unique per agent process, so that a fast restart is never taken for its predecessor."""
    host: str
    port: int
    """Where the agent listens; a refused connection here proves that it is dead."""
    slots: int
    ready: tuple[int, ...] = ()
    """Slots that may be given a rank: a worker stands there, or (`on_loss = wait`) will shortly."""
    draining: str | None = None
    done: int = 0
    """The newest generation all of whose local workers have finished `train`; 0 = none."""
    unreachable: tuple[str, ...] = ()
    """Nodes, sorted, whose agents do not answer this one although their leases stand."""
    standings: tuple[Standing, ...] = ()
    """Of the workers here that showed no progress when it was last looked at; written when a job stands still, and
    told to be out of date by its positions."""
    managed: bool = False
    """Whether workers of the job are known there to call `elastic.run`."""


class Place(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One member node of a generation. `slots` in rank order: a survivor before a newcomer."""

    node: str
    incarnation: str
    host: str
    slots: tuple[int, ...]
    port: int = 0
    """Where its agent listens for others."""


class Splice(msgspec.Struct, frozen=True, array_like=True):
    """Instead of the earlier places [start:stop]: these."""

    start: int
    stop: int
    places: tuple[Place, ...] = ()


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """How a large generation's places follow from those of the one before: whoever has read that one can do without
    reading them all again."""

    since: str
    """Digest of the earlier places as they are written."""
    splices: tuple[Splice, ...]


class GenerationHead(Record, frozen=True, kw_only=True):
    """What stands in the record of a generation beside its places."""

    number: int
    store_host: str
    store_port: int
    """The TCPStore of this generation, hosted by the leader's agent."""
    leader: str
    why: str
    at_step: int | None = None
    """Planned change: the generation before runs until it has committed this step. None: let go now."""
    restore: str = "newest"
    """'newest': live state, then snapshot, then checkpoint. 'snapshot': live state is not trusted (roll back)."""
    changes: Changes | None = None
    """Of a large one, when they are few."""
    managed: bool = False
    """Whether its leader knew the job's workers to call `elastic.run`."""


FEW = 4
"""To look for more nodes than this one by one is more work than to put all in order."""

_node, _slots = operator.attrgetter("node"), operator.attrgetter("slots")


class GenerationRecord(GenerationHead, frozen=True, kw_only=True, dict=True):
    """One formed world. Immutable; re-forming makes the next number."""

    places: tuple[Place, ...]
    """Node rank = index here. Ranks count through `slots`, place by place."""

    # There may be thousands of places, and some questions come in every turn: they are answered once per generation,
    # and `places` carries the answers over to the next.

    @cached_property
    def world_size(self) -> int:
        return sum(map(len, map(_slots, self.places)))

    @cached_property
    def order(self) -> dict[str, int]:
        """node -> node rank."""
        return {node: i for i, node in enumerate(map(_node, self.places))}

    @cached_property
    def asked(self) -> tuple[dict[str, int | None], dict[str, int]]:
        """Of the nodes that were asked for: node ranks, and the rank of the first worker."""
        return {}, {}

    def at(self, node: str) -> int | None:
        """Its node rank; None: it is not a member."""
        known = self.asked[0]
        if node not in known:
            if len(known) >= FEW or "order" in self.__dict__:
                return self.order.get(node)
            nodes = list(map(_node, self.places))
            known[node] = nodes.index(node) if node in nodes else None
        return known[node]

    def place(self, node: str, incarnation: str) -> Place | None:
        at = self.at(node)
        return self.places[at] if at is not None and self.places[at].incarnation == incarnation else None

    def ranks(self, node: str) -> dict[int, int]:
        """slot -> rank on `node`; empty when the node is not a member."""
        at, firsts = self.at(node), self.asked[1]
        if at is None:
            return {}
        if node not in firsts:
            firsts[node] = sum(map(len, map(_slots, self.places[:at])))
        return {slot: firsts[node] + i for i, slot in enumerate(self.places[at].slots)}


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A further failure of a generation that is broken already."""

    node: str
    kind: str
    detail: str
    slots: tuple[int, ...] = ()
    """Slots of `node` whose workers are lost."""
    ranks: tuple[int, ...] = ()
    step: int | None = None


class BrokenRecord(Record, frozen=True, kw_only=True):
    """The first failure of a generation, and in `also` those that were reported after it. A collective that failed for
    a reason that its rank did not know gives way to the reason when that is reported: see `evidence`."""

    generation: int
    node: str
    kind: str
    """exit, hang, comm, form, drain, undrain, idle, respawn, or of bad numbers: nan, inf, drift, …"""
    detail: str
    slots: tuple[int, ...] = ()
    """Slots of `node` whose workers are lost: their state is gone, they go behind survivors."""
    ranks: tuple[int, ...] = ()
    error: WorkerError | None = None
    fingerprint: str = ""
    step: int | None = None
    charged: bool = True
    """Whether this counts against the restart budget."""
    rollback: bool = False
    """The state itself is not to be trusted: restore the newest snapshot or checkpoint, not live state."""
    also: tuple[Loss, ...] = ()
    """At most `evidence.KEPT_LOSSES` of them."""
    stacks: dict[str, str] = {}
    """Hang: process -> its stack, saved before the kill."""

    def lost(self, node: str) -> frozenset[int]:
        """Slots of `node` whose workers are known to be lost."""
        first = self.slots if node == self.node else ()
        return frozenset([*first, *(slot for loss in self.also if loss.node == node for slot in loss.slots)])


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of an incident."""

    generation: int
    """The generation that it broke."""
    node: str
    kind: str
    ranks: tuple[int, ...] = ()
    """Ranks of `generation` that were lost by it."""
    detail: str = ""
    """The evidence."""


class IncidentRecord(Record, frozen=True, kw_only=True):
    """One failure or planned change and its recovery. Written when it begins (`open`), and again when it is over."""

    generation: int
    """The generation formed by the recovery; while it is open, the next one."""
    kind: str
    """Of the first cause: see BrokenRecord; or lost, unreachable, planned, checkpoint."""
    node: str
    """Nodes of the causes in the generation that failed first, comma-separated."""
    ranks: tuple[int, ...]
    """All ranks lost in the generation that failed first."""
    detail: str
    """Evidence of the first cause."""
    wall_s: float
    """When it began: the detection; where all agents had died, the last sign of life of any of them."""
    timeline_s: dict[str, float] = {}
    """Phase -> seconds since `wall_s`, on the clock of the node that reports."""
    open: bool = False
    """The job has not recovered yet."""
    ended_wall_s: float | None = None
    causes: tuple[Cause, ...] = ()
    """All failures, the first one first; those reported during the recovery, too."""
    step: int | None = None
    """The newest step known to have been committed before it."""
    steps_lost: int | None = None
    """Committed steps that were done again, as far as known: at least so many. None: nothing is known."""
    steps_lost_at_most: int | None = None
    """Equal to `steps_lost` where the number is certain; None: no bound is known."""
    world_size_before: int = 0
    world_size_after: int = 0
    restored_from: str = ""
    """'live', 'snapshot', 'checkpoint' or 'nothing'."""
    stacks: dict[str, str] = {}
    """Hang: who -> stack, saved before the kill."""
    error: WorkerError | None = None


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    node: str
    slot: int
    pid: int
    phase: str
    step: int
    incarnation: int
    """How many workers this slot has had before, in this agent's life."""
    rss_mb: float | None = None


class Stillness(msgspec.Struct, frozen=True, kw_only=True):
    """No rank has committed a step for longer than ten step times."""

    since_wall_s: float
    because: str
    """What is known of the cause, in words."""
    rank: int | None = None
    """The rank at which the cause probably lies; None: not known."""
    node: str = ""
    """Its node, or the node that has not said how its ranks do."""
    declared: bool = False
    """The script has declared this span (`job.quiet`)."""


class ProgressRecord(Record, frozen=True, kw_only=True):
    """What `status` shows of a running job. Written by the leader every few seconds, never per step."""

    generation: int
    world_size: int
    step: int
    steps_per_s: float
    loss: float | None
    wall_s: float
    step_wall_s: float = 0.0
    """When `step` was seen to be committed, give or take half a second; 0: not known."""
    stepped_in: int = 0
    """The newest generation in which a step is known to have been committed."""
    checkpoint_step: int | None = None
    checkpoint_wall_s: float | None = None
    checkpoint_error: str | None = None
    checkpoint_interval: str = ""
    checkpoint_skipped: int = 0
    snapshot_step: int | None = None
    """Newest snapshot that the leader's node holds whole in memory."""
    snapshot_mb: float = 0.0
    """Memory given to snapshots on the leader's node."""
    snapshot_interval: str = ""
    waiting_for: str = ""
    still: Stillness | None = None
    """Set while no step is made."""
    ranks: tuple[RankRow, ...] = ()
    managed: bool = False
    """Whether the script has called `elastic.run`; else it is a plain script, started anew in each generation."""


R = TypeVar("R", bound=Record)

_encoder = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


class _Version(msgspec.Struct):
    protocol: int = 0


def decode(kind: type[R], raw: bytes) -> R:
    """Read one record. Raises ProtocolVersionMismatch, or msgspec.ValidationError for what is not such a record."""
    try:
        theirs = _VERSIONS.decode(raw).protocol
        if theirs != PROTOCOL:
            raise ProtocolVersionMismatch(kind.__name__, theirs)
        return cast(R, _DECODERS[kind].decode(raw))
    except (UnicodeDecodeError, RecursionError) as error:
        # msgspec lets these through; nobody who reads records should have to know.
        raise msgspec.ValidationError(f"{kind.__name__}: {error}") from error


# Made once, here: msgspec looks into a type when it is first used, and does not bear two threads doing that at a time.
_VERSIONS = msgspec.json.Decoder(_Version)
_KINDS: list[type[Record]] = [*Record.__subclasses__(), GenerationRecord]
_DECODERS: dict[type[Record], msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}
