"""The records in etcd: one frozen struct per key, encoded as JSON, each with its protocol version.

Times named ``*_wall_s`` are seconds since 1970 for users to read; nothing is decided by them.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import msgspec

from elastic.contract.job.spec import JobSpec
from elastic.contract.numbers import Int, Real, WallS
from elastic.contract.origin import Origin
from elastic.contract.step_parts import SlowRank, StepParts

from .ledger import Ledger
from .reasons import Text, in_words
from .standings import Standing, Stillness

PROTOCOL = 7
"""Version of every record and message. A reader that finds another version takes no part, and reports that."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    protocol: int = PROTOCOL


class ProtocolVersionMismatch(Exception):
    """A record was written by an elasticd version with another protocol."""

    def __init__(self, kind: str, theirs: int) -> None:
        super().__init__(
            f"{kind} speaks protocol {theirs}, this elasticd speaks {PROTOCOL}: "
            f"run the same elasticd version on every node of the cluster, and forget jobs of an earlier one"
        )


class SpecRecord(Record, frozen=True, kw_only=True):
    spec: JobSpec
    submitted_wall_s: float
    submitted_by: str
    uid: int | None = None  # of the job's user, whose account its agents run in; None: not recorded
    gid: int | None = None
    user: str = ""
    submission: str = ""
    """Random, and kept when the spec is changed: the signatures of the job's other records name it."""


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
    """Why a worker ended, as far as is known: from torch's error file, else from its exit status."""

    node: str
    slot: Int
    rank: Int
    message: str
    traceback: str = ""
    exit_code: Int | None = None
    signal: str | None = None  # that ended it; beside an exit code SIGTERM, which its script has handled before
    step: Int | None = None
    last_lines: tuple[str, ...] = ()
    """Of its log, where `traceback` is not taken from that."""
    no_state: bool = False
    """No rank found a state to resume from (NoStateError)."""
    exception: str = ""
    """The exception's type, if it was one."""
    misuse: bool = False
    """elastic has refused what the script does (`worker.misuse`): the next try would do the same."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure that counts against the job's restart budget."""

    wall_s: WallS
    generation: Int
    node: str
    fingerprint: str
    """Equal for two failures that are the same: exception type and place, or the signal; see `restart_budget`."""
    step: Int | None = None
    slots: tuple[Int, ...] = ()
    """Slots of the failed workers on `node`."""
    no_state: bool = False
    """See WorkerError."""


class JobState(Record, frozen=True, kw_only=True):
    phase: Phase = Phase.PENDING
    reason: Text = ""
    since_wall_s: WallS = 0.0
    restarts: Int = 0
    """Failures counted over the job's whole life."""
    failures: tuple[Failure, ...] = ()
    """Those still inside the sliding window, oldest first."""
    error: WorkerError | None = None
    """Of the first failing rank of the newest failure."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes excluded from this job: its workers die there more often than elsewhere, or no agent of it starts there."""
    no_agent: dict[str, Text] = {}
    """Of these, the nodes on which no agent of it starts, or no worker for lack of something there -> why."""


class MemberRecord(Record, frozen=True, kw_only=True):
    """An agent of the job, in the generation or ready to join. Leased: it expires with the agent."""

    node: str
    incarnation: str
    """Unique per agent process, so that a restarted agent is never taken for its predecessor."""
    host: str
    port: Int
    """Where the agent listens; a refused connection here proves that it is dead."""
    slots: Int
    ready: tuple[Int, ...] = ()
    """Slots that may be given a rank: they have a worker, or (`on_loss = wait`) will have one shortly."""
    draining: Text | None = None
    done: Int = 0
    """The newest generation all of whose local workers have finished `train`, all saved; 0 = none."""
    unreachable: tuple[str, ...] = ()
    """Nodes, sorted, whose agents do not answer this one although their leases are valid."""
    standings: tuple[Standing, ...] = ()
    """Of local workers that showed no progress: written when a job stands still; the positions show if it is stale."""
    managed: bool = False  # this agent has learnt that the job's workers call `elastic.run`
    lacks: Text = ""  # why workers cannot be started here, tried several times: something is lacking on the node
    saved_generation: Int = 0  # the newest in this node's checkpoint folder, if no other node sees it; 0 = none
    held_generation: Int = 0  # whose state local workers have, though the node has no place now; 0 = none
    held_consistent: Int = 0  # the same, of workers whose state is consistent
    folder: str = ""  # id of its checkpoint folder, if that is to be the same for all nodes; empty: not known
    code: str = ""  # digest of the script that this node's workers run; empty: not known


class GenerationNode(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One member node of a generation. `slots` in rank order."""

    node: str
    incarnation: str
    host: str
    slots: tuple[Int, ...]
    port: Int = 0
    """Where its agent listens for other agents."""


class Splice(msgspec.Struct, frozen=True, array_like=True):
    """Replaces the earlier nodes [start:stop] by `nodes`."""

    start: Int
    stop: Int
    nodes: tuple[GenerationNode, ...] = ()


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """How a large generation's nodes differ from the base's."""

    since: str  # digest of the base's nodes as encoded
    splices: tuple[Splice, ...]


class GenerationHead(Record, frozen=True, kw_only=True):
    """The record of a generation without its nodes."""

    number: Int
    previous: Int = 0  # see `before`
    store_host: str
    store_port: Int  # of the TCPStore of this generation, hosted by the leader's agent
    store_secret: str = ""  # seals the values in the store (`util.sealed_store`); never logged or shown
    leader: str
    why: Text
    at_step: Int | None = None
    """Planned change: the generation before runs until it has committed this step. None: its group is aborted now."""
    restore: str = "newest"
    """'newest': the newest of live state, snapshot and checkpoint. 'snapshot': live state is not trusted (rollback)."""
    managed: bool = False
    """Whether its leader had learnt that the job's workers call `elastic.run`."""
    newcomers: tuple[str, ...] = ()
    """Nodes that have joined since the last generation that is known to have stepped: they lead after all others."""

    @property
    def before(self) -> int:
        """Number of the generation that it follows; of the first one, a number that no generation has. Numbers may be
        left out once etcd has lost its data."""
        return self.previous or self.number - 1


LINEAR_SEARCH_MAX = 8
"""This many nodes are searched for one by one; for more, an index of all nodes costs less."""

_node, _slots = operator.attrgetter("node"), operator.attrgetter("slots")


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """With how many equal objects both begin."""
    unlike = itertools.compress(itertools.count(), map(operator.ne, one, other))
    return next(unlike, min(len(one), len(other)))


class GenerationRecord(GenerationHead, frozen=True, kw_only=True, dict=True):
    """One numbered membership of a job. Immutable; a re-formation creates the next number."""

    nodes: tuple[GenerationNode, ...]
    """Node rank = index here. Ranks count through `slots`, node by node."""

    # There may be thousands of nodes: results are cached, and `generation_delta` carries them over to the next record.

    @cached_property
    def world_size(self) -> int:
        return sum(map(len, map(_slots, self.nodes)))

    @cached_property
    def order(self) -> dict[str, int]:
        """node -> node rank."""
        return {node: i for i, node in enumerate(map(_node, self.nodes))}

    @cached_property
    def asked(self) -> tuple[dict[str, int | None], dict[str, int]]:
        """Caches of lookups: node -> node rank, None if not a member; and node -> rank of its first worker."""
        return {}, {}

    def at(self, node: str) -> int | None:
        """Node rank of `node`; None: it is not a member."""
        node_ranks = self.asked[0]
        if node not in node_ranks:
            if len(node_ranks) >= LINEAR_SEARCH_MAX or "order" in self.__dict__:
                return self.order.get(node)
            nodes = list(map(_node, self.nodes))
            node_ranks[node] = nodes.index(node) if node in nodes else None
        return node_ranks[node]

    def node_of(self, node: str, incarnation: str) -> GenerationNode | None:
        at = self.at(node)
        return self.nodes[at] if at is not None and self.nodes[at].incarnation == incarnation else None

    def changed(self, later: GenerationRecord) -> list[GenerationNode]:
        """Its nodes that are not the same in `later`."""
        mine, theirs = self._apart(later)
        same = set(theirs)
        return [place for place in mine if place not in same]

    def absent(self, later: GenerationRecord) -> list[GenerationNode]:
        """Its nodes that are not in `later`."""
        mine, theirs = self._apart(later)
        there = {(place.node, place.incarnation) for place in theirs}
        return [place for place in mine if (place.node, place.incarnation) not in there]

    def _apart(self, later: GenerationRecord) -> tuple[Sequence[GenerationNode], Sequence[GenerationNode]]:
        """Its nodes and those of `later`, without the ones that both begin and end with: in a large job nearly all."""
        start = _alike(self.nodes, later.nodes)
        mine, theirs = self.nodes[start:], later.nodes[start:]
        end = _alike(mine[::-1], theirs[::-1])
        return mine[: len(mine) - end], theirs[: len(theirs) - end]

    def ranks(self, node: str) -> dict[int, int]:
        """slot -> rank on `node`; empty when the node is not a member."""
        at, firsts = self.at(node), self.asked[1]
        if at is None:
            return {}
        if node not in firsts:
            firsts[node] = sum(map(len, map(_slots, self.nodes[:at])))
        return {slot: firsts[node] + i for i, slot in enumerate(self.nodes[at].slots)}


class GenerationDelta(GenerationHead, frozen=True, kw_only=True):
    """A large generation as it is in etcd, where the job has a base: see `generation_delta`."""

    changes: Changes


class BaseRecord(Record, frozen=True, kw_only=True):
    """The nodes of an earlier generation of a large job, since which newer ones tell their changes."""

    nodes: tuple[GenerationNode, ...]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A further failure of a generation that is already broken."""

    node: str
    kind: str
    detail: Text
    slots: tuple[Int, ...] = ()
    """Slots of `node` whose workers are lost."""
    ranks: tuple[Int, ...] = ()
    step: Int | None = None
    step_in: Int = 0  # as in BrokenRecord


class BrokenRecord(Record, frozen=True, kw_only=True):
    """The first failure of a generation, and in `also` those reported after it. A failed collective without a known
    cause is replaced by the cause when that is reported: see `evidence`."""

    generation: Int
    node: str
    kind: str
    """exit, shortage, hang, comm, store, form, drain, undrain, boundary, idle, respawn, nan, inf, drift, …"""
    detail: Text
    slots: tuple[Int, ...] = ()
    """Slots of `node` whose workers are lost: their state is gone."""
    ranks: tuple[Int, ...] = ()
    error: WorkerError | None = None
    fingerprint: str = ""
    step: Int | None = None
    step_in: Int = 0  # the generation in which `step` was reached, perhaps an earlier one; 0: not known
    charged: bool = True  # whether this counts against the restart budget
    rollback: bool = False
    """The state itself is not trusted: restore the newest snapshot or checkpoint, not live state."""
    also: tuple[Loss, ...] = ()  # at most `evidence.KEPT_LOSSES` of them
    stacks: dict[str, str] = {}
    """Hang: process -> its stack, dumped before the kill."""
    last_lines: tuple[str, ...] = ()
    """Of the log of a worker that was killed by a signal."""

    @property
    def no_state(self) -> bool:
        """A rank found no state to resume from: that follows from an earlier failure, or the state is out of reach for
        a while: a file system is mounted late, a store fails for a moment, the node that has the checkpoint returns."""
        return self.error is not None and self.error.no_state

    def lost(self, node: str) -> frozenset[int]:
        """Slots of `node` whose workers are known to be lost."""
        first = self.slots if node == self.node else ()
        return frozenset([*first, *(slot for loss in self.also if loss.node == node for slot in loss.slots)])


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of an incident."""

    generation: Int  # the generation that it broke
    node: str
    kind: str
    ranks: tuple[Int, ...] = ()  # ranks of `generation` that were lost by it
    detail: Text = ""  # the evidence


class IncidentRecord(Record, frozen=True, kw_only=True):
    """One failure or planned change and its recovery. Written when it begins (`open`), and again when it is over."""

    generation: Int
    """The generation formed by the recovery; while it is open, the next one."""
    kind: str
    """Of the first cause: see BrokenRecord; or lost, unreachable, planned, checkpoint, no-state."""
    node: str
    """Nodes of the causes in the generation that failed first, comma-separated."""
    ranks: tuple[Int, ...]
    """All ranks lost in the generation that failed first."""
    detail: Text
    """Evidence of the first cause."""
    further: Int = 0
    """How many causes there are beside that one: `causes` may list fewer."""
    begun_again_at: Int = 0
    """The step that was done when all state was lost and training began again from 0; 0: it did not."""
    wall_s: WallS
    """When it began: the detection; if all agents had died, the last sign of life of any of them."""
    still_s: Real = 0.0
    """For how long no step had been made by then, as the node knows that noticed it; 0: it is not known."""
    timeline_s: dict[str, Real] = {}
    """Phase -> seconds since `wall_s`, on the clock of the node that reports."""
    open: bool = False  # the job has not recovered yet
    repeat: Int = 0  # false alarms of the same generation that were over before it began: see `JobKeys.incident`
    id: str = ""  # its key below `JobKeys.incidents`, set by the reader
    ended_wall_s: WallS | None = None
    causes: tuple[Cause, ...] = ()
    """All failures, the first one first, including those reported during the recovery."""
    step: Int | None = None
    """The newest step known to have been committed before it."""
    steps_lost: Int | None = None
    """Committed steps that had to be repeated: at least this many. None: nothing is known."""
    steps_lost_at_most: Int | None = None
    """Equal to `steps_lost` if the number is certain; None: no bound is known."""
    world_size_before: Int = 0
    world_size_after: Int = 0
    restored_from: str = ""
    """In words, as `messages.Synced.source`; '' while it is open or if it is not known."""
    origin: Origin | None = None  # the same as a value
    stacks: dict[str, str] = {}
    """Hang: process -> its stack, dumped before the kill."""
    last_lines: tuple[str, ...] = ()
    """Of the log of a worker that was killed by a signal."""
    error: WorkerError | None = None

    @property
    def took_s(self) -> float | None:
        """From the last step before it to the first one after it, or to its end; None: that is not known."""
        lasted_s = max(self.timeline_s.values(), default=None)
        return None if lasted_s is None else round(self.still_s + lasted_s, 4)

    @property
    def text(self) -> str:
        """Evidence of the first cause in words, and how many others there are."""
        more = f" (and {self.further} more)" if self.further else ""
        lost = "; all state was lost, and no checkpoint was ever saved: step {} was done, begun again from 0"
        return f"{self.detail}{more}{lost.format(self.begun_again_at) if self.begun_again_at else ''}"

    def in_words(self) -> dict[str, Any]:
        """As plain data for people: each reason is its sentence."""
        row: dict[str, Any] = in_words(self)
        del row["further"], row["begun_again_at"], row["id"]
        return row | {"detail": self.text}


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    rank: Int
    node: str
    slot: Int
    pid: Int
    phase: str
    step: Int
    incarnation: Int  # how many workers this slot has had before, in this agent's lifetime
    rss_mb: Real | None = None
    step_s: Real = 0.0  # duration of its last step; 0: none yet
    parts: StepParts | None = None  # of its steps lately


NotFinite = Literal["nan", "inf", "-inf"]


class ProgressRecord(Record, frozen=True, kw_only=True):
    """A running job as `status` shows it. Written by the leader every few seconds, never per step."""

    generation: Int
    world_size: Int
    step: Int
    steps_per_s: Real
    loss: float | None
    wall_s: WallS
    step_wall_s: WallS = 0.0
    """When `step` was seen to be committed, to within half a second; 0: not known."""
    stepped_in: Int = 0
    """The newest generation in which a step is known to have been committed."""
    checkpoint_step: Int | None = None
    checkpoint_generation: Int = 0  # in which that step was committed; 0: not known
    checkpoint_wall_s: WallS | None = None
    checkpoint_write_s: Real | None = None
    checkpoint_error: Text | None = None
    resumed_step: Int | None = None  # at which the job has gone on from saved state, the last time it did; None: never
    resumed_from: str = ""  # that state in words, as `messages.Synced.source`
    checkpoint_interval: str = ""
    checkpoint_skipped: Int = 0
    snapshot_step: Int | None = None
    """Newest snapshot that the leader's node holds completely in memory."""
    snapshot_mb: Real = 0.0
    """Memory used by snapshots on the leader's node."""
    snapshot_interval: Text = ""
    snapshot_copies: Text = ""
    """What the loss of a node costs a sharded job at present."""
    waiting_for: Text = ""
    still: Stillness | None = None  # set while no step is made
    ranks: tuple[RankRow, ...] = ()
    managed: bool = False
    """Whether the script has called `elastic.run`; otherwise it is plain, and started anew in each generation."""
    slow_ranks: tuple[SlowRank, ...] = ()  # of the leader's node
    logged: dict[str, float] = {}
    """The newest value of each name that the script gave to `job.log`."""
    logged_not_finite: dict[str, NotFinite] = {}  # those for which JSON has no number
    ledger: Ledger | None = None
    """What the time of all ranks went into, since the job was submitted."""


R = TypeVar("R", bound=Record)
encode: Callable[[Record], bytes] = msgspec.json.Encoder().encode


class _Version(msgspec.Struct):
    protocol: int = 0


def decode(kind: type[R], raw: bytes) -> R:
    """Read one record. Raises ProtocolVersionMismatch, or msgspec.ValidationError for a malformed record."""
    try:
        theirs = _VERSIONS.decode(raw).protocol
        if theirs != PROTOCOL:
            raise ProtocolVersionMismatch(kind.__name__, theirs)
        return cast(R, _decoder(kind).decode(raw))
    except (UnicodeDecodeError, RecursionError) as error:
        # msgspec lets these through; callers handle one exception.
        raise msgspec.ValidationError(f"{kind.__name__}: {error}") from error


@functools.cache
def _decoder(kind: type[Record]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


# Created once, at import: msgspec inspects a type on its first use, which is not safe in two threads at a time.
_VERSIONS = msgspec.json.Decoder(_Version)


def prepare(*kinds: type[Record]) -> None:
    """Called at import, by each module that defines records."""
    for kind in kinds:
        _decoder(kind)


prepare(*Record.__subclasses__(), GenerationRecord, GenerationDelta)
