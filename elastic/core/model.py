"""The values that an agent's recovery works on: its workers, and all that it knows. See `recovery`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from .incident import Closed, Incident
from .membership import LEADER_CANDIDATES, Dead, Limits
from .records import BrokenRecord, GenerationRecord, JobState, MemberRecord, SpecRecord, Standing
from .spec import JobSpec
from .timeouts import Timeouts
from .transitions import Stage
from .view import JobView

CROWD = 64


class Worker(msgspec.Struct, frozen=True):
    slot: int
    worker_id: int
    """Unique per process in this agent's life."""
    stage: Stage
    generation: int = 0
    """The newest generation it was told to form."""
    since_s: float = 0.0
    deadline_s: float = float("inf")
    step: int = 0
    crashes: int = 0
    """Deaths of this slot since it last committed a step."""
    told_to_end: bool = False
    """SIGTERM was sent, and no SIGKILL."""
    synced: int = 0
    """The newest generation in which its process has held the job's state."""
    seat: int = 0
    """The generation whose rank its process was started with, when it has called `elastic.run` and not formed yet."""


def has_process(worker: Worker, managed: bool) -> bool:
    """Whether a process of it may still live. A plain worker has one only between its start and its end."""
    return worker.stage is not Stage.GONE and (managed or worker.stage not in (Stage.READY, Stage.DONE))


class Policy(msgspec.Struct, frozen=True):
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
    """The script calls `elastic.run`, so its workers survive a re-formation; plain ones are replaced each time. Every
    job begins as plain, and the first worker that makes the call changes it: see `manner`."""
    spec: JobSpec
    timeouts: Timeouts
    crowd: int = CROWD
    """In a generation of more nodes than this, not every agent sees all members: see `sight`."""
    leader_candidates: int = LEADER_CANDIDATES
    """So many see them in any case: those that may come to lead."""


class Agent(msgspec.Struct, frozen=True):
    """A struct, since a turn changes a few of its many fields several times over."""

    policy: Policy
    view: JobView = msgspec.field(default_factory=JobView)
    joined: bool = False
    connected: bool = False
    generation: GenerationRecord | None = None
    """The newest this agent knows; outlives etcd."""
    formed_at_s: float = float("-inf")
    """When this agent came to know it."""
    last_committed: GenerationRecord | None = None
    """The newest before it in which a local worker has committed a step."""
    ranks: tuple[GenerationRecord | None, Mapping[int, int]] = (None, MappingProxyType({}))
    """slot -> rank of our workers in that generation: see `Turn.my_ranks`."""
    broken: int = 0
    """The newest generation known to be broken."""
    broken_record: BrokenRecord | None = None
    """Who said so, and why; outlives etcd."""
    broken_at_s: float = float("-inf")
    """When this agent came to know it."""
    state: JobState = msgspec.field(default_factory=JobState)
    """The newest that etcd has shown; outlives etcd."""
    spec: SpecRecord | None = None
    """The newest that etcd has shown; outlives etcd."""
    absence_ignored_until_s: float = float("-inf")
    """etcd was wiped or away: until then, who is absent may only not have come back to it yet."""
    wiped_until_s: float = float("-inf")
    """etcd has lost its data: until then, somebody may still come with a newer generation than stands there."""
    orphaned_s: float | None = None
    """Since when nobody of the generation can be heard of."""
    dead: Dead = frozenset()
    dead_since_s: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict)
    falsely_suspected: Dead = frozenset()
    """Called dead here, and alive all the same: what refuses our calls to them proves nothing but that it does."""
    unreachable: frozenset[tuple[str, str]] = frozenset()
    """(node, incarnation) of members whose agents do not answer us."""
    disputed_s: float = float("-inf")
    """When the newest complaint of anybody of anybody was heard of."""
    workers: Mapping[int, Worker] = msgspec.field(default_factory=dict)
    standbys: tuple[Worker, ...] = ()
    spawned: int = 0
    published: MemberRecord | None = None
    fine: tuple[tuple[object, ...], tuple[object, ...]] | None = None
    """What was given when all was last found as it should be: see `leading`."""
    publishing: int = 0
    """Number of the generation whose compare-and-swap is under way; 0 = none."""
    min_reached_s: float | None = None
    step: int = 0
    step_s: float = 0.0
    stepped_at_s: float = float("-inf")
    settled: int = 0
    """The newest generation in which a local worker has committed a step."""
    standings: tuple[Standing, ...] = ()
    """How far local workers have got that show no progress, as the others are told."""
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
    halted: bool = False
    """As leader: nothing steps, and too few nodes are left to go on."""
    reached: tuple[int, int] = (0, 0)
    """(generation, step) of the newest commit known here: of this node's workers, also of those that have died, and
    of those of the agent before this one."""
    left_wall_s: float = 0.0
    """When the agent before this one was last known to live, by its own clock."""
    incident: Incident | None = None
    """What is known of an incident that is not over."""
    reported: int = 0
    """Key of the last incident that was over."""
    closed: Closed | None = None
    """That incident, if this agent has followed it."""
    asked: Mapping[str, float] = msgspec.field(default_factory=dict)
    """What was asked for and is not confirmed yet, and when."""
