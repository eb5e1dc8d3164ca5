"""The state of an agent's recovery: its workers, and all that it has learnt of the job. See `recovery`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from elastic.contract.job.spec import JobSpec
from elastic.contract.records import job_records
from elastic.contract.records.reasons import Text
from elastic.contract.records.standings import Standing
from elastic.contract.timeouts import Timeouts
from elastic.recovery.facts.incident import AccountFacts, Incident
from elastic.recovery.facts.membership import LEADER_CANDIDATES, NodeLimits, leader
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.facts.view import Dead, JobView

LARGE_JOB_NODES = 64
"""Default of `Policy.crowd`."""


class Worker(msgspec.Struct, frozen=True):
    slot: int
    worker_id: int
    """Unique per process in this agent's lifetime."""
    stage: Stage
    generation: int = 0
    """The newest generation it was told to form."""
    since_s: float = 0.0
    deadline_s: float = float("inf")
    step: int = 0
    crashes: int = 0
    """Failures of this slot's workers since one of them last committed a step."""
    told_to_end: bool = False
    """It was told to end by SIGTERM, not killed at once."""
    synced: int = 0
    """The newest generation in which its process has held the job's state."""
    formed: int = 0
    """The newest generation whose group one of the slot's workers has formed: it exchanges the state from then on."""
    consistent: bool = True
    """Its state was consistent when it left the newest group."""
    started: bool = False
    """Its process runs. A worker is ordered before, and its zygote may have to import first."""
    left: int = 0
    """The newest generation that it has left between two steps: see messages.GroupClosed."""
    lacks: Text = ""
    """What the node lacked when the slot's last process was to be started. The slot is given no rank until the next one
    is ready (a plain one: until it is tried again)."""
    seat: int = 0
    """The generation whose rank its process was started with, if it has called `elastic.run` and not formed since."""


def has_process(worker: Worker, managed: bool) -> bool:
    """Whether the worker may have a process. A plain worker has one only from its fork to its exit."""
    return worker.stage is not Stage.GONE and (managed or worker.stage not in (Stage.READY, Stage.DONE))


class Policy(msgspec.Struct, frozen=True):
    """The parts of the job's spec and of the node's settings that recovery depends on."""

    node: str
    incarnation: str
    host: str
    port: int
    slots: int
    managed: bool
    """The script calls `elastic.run`, so its workers survive a re-formation; plain workers are replaced each time.
    Every job starts as plain until its first worker makes the call: see `knowledge.mark_managed`."""
    spec: JobSpec
    timeouts: Timeouts
    crowd: int = LARGE_JOB_NODES
    """In a generation of more nodes than this, a large job, not every agent watches all members: see `watch_scope`."""
    submitted_wall_s: float = 0.0
    """Of this agent's job: one that was submitted later is another, which has taken the name; 0: not known."""
    leader_candidates: int = LEADER_CANDIDATES
    """How many agents watch them in any case: the leader candidates."""
    code: str = ""
    """See MemberRecord."""

    @property
    def limits(self) -> NodeLimits:
        return NodeLimits(self.spec.min_nodes, self.spec.max_nodes, self.spec.join_wait_s)

    @property
    def shrink(self) -> bool:
        return self.spec.on_loss == "shrink"


class PendingFailure(msgspec.Struct, frozen=True):
    """A failure outside any generation (a worker that does not even start), to be counted: see `failure_counts`."""

    record: job_records.BrokenRecord
    wall_s: float
    """When it happened."""
    written: job_records.Failure | None = None
    """What was last written to the job's state; the write may have failed."""


class EtcdState(msgspec.Struct, frozen=True):
    """The agent's view of etcd, and its requests to etcd that are under way."""

    view: JobView = msgspec.field(default_factory=JobView)
    joined: bool = False
    connected: bool = False
    state: job_records.JobState = msgspec.field(default_factory=job_records.JobState)
    """The newest that etcd has shown; kept while etcd is unavailable or wiped."""
    spec: job_records.SpecRecord | None = None
    """The newest that etcd has shown; kept while etcd is unavailable or wiped."""
    absence_ignored_until_s: float = float("-inf")
    """etcd was wiped or unavailable: until then, an absent member may only not have registered again yet."""
    wiped_until_s: float = float("-inf")
    """etcd has lost its data: until then, an agent may still restore a newer generation than etcd shows."""
    lost_at: int = -1
    """The newest generation known here when etcd was last seen to have lost data; -1: it was not."""
    orphaned_s: float | None = None
    """Since when all nodes that hold the job's state are absent from etcd, with none known to be dead; None: not so."""
    published: job_records.MemberRecord | None = None
    uncounted: tuple[PendingFailure, ...] = ()
    """Failures of this node's workers that the job's state does not show yet, oldest first."""
    asked: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Request -> when it was last made: see `Turn.ask`."""


class FormedState(msgspec.Struct, frozen=True):
    """The newest generation, and whether it is broken."""

    generation: job_records.GenerationRecord | None = None
    """The newest that this agent has seen; kept while etcd is unavailable or wiped."""
    formed_at_s: float = float("-inf")
    """When this agent first saw it."""
    last_committed: job_records.GenerationRecord | None = None
    """The newest generation before it that is known here to have committed a step."""
    ranks: tuple[int, Mapping[int, int]] = (0, MappingProxyType({}))
    """(number of a generation, slot -> rank of our workers in it), cached: see `Turn.my_ranks`."""
    broken: int = 0
    """The newest generation known to be broken."""
    broken_record: job_records.BrokenRecord | None = None
    """Its failure report; kept while etcd is unavailable or wiped."""
    broken_at_s: float = float("-inf")
    """When this agent learnt of it."""


class PeerState(msgspec.Struct, frozen=True):
    """The other agents, as far as this one can tell whether they live."""

    dead: Dead = frozenset()
    dead_since_s: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict)
    falsely_suspected: Dead = frozenset()
    """Marked dead here while alive. A refused connection to one of these agents only proves that it is unreachable."""
    unreachable: frozenset[tuple[str, str]] = frozenset()
    """(node, incarnation) of members whose agents do not answer this one."""
    disputed_s: float = float("-inf")
    """When a new dispute between any two members was last seen."""


class LocalState(msgspec.Struct, frozen=True):
    """The workers of this node."""

    workers: Mapping[int, Worker] = msgspec.field(default_factory=dict)
    standbys: tuple[Worker, ...] = ()
    spawned: int = 0
    standings: tuple[Standing, ...] = ()
    """How far the local workers that show no progress have got, as published to the other agents."""
    suspicious_since_s: float | None = None
    """Since when a collective that failed here has had no known cause; None: there is none."""
    suspicion: Text = ""
    saving: bool = False
    """Snapshots of local workers are on their way to disk."""


class ProgressState(msgspec.Struct, frozen=True):
    """How far the job has got, as far as is known here."""

    step: int = 0
    step_in: int = 0
    """The generation in which `step` was committed."""
    step_s: float = 0.0
    stepped_at_s: float = float("-inf")
    shown_at_s: float = float("-inf")
    """When a newer step was last seen on record, with no incident open: for an agent whose node has no rank."""
    settled: int = 0
    """The newest generation in which a local worker has committed a step."""
    reached: tuple[int, int] = (0, 0)
    """(generation, step) of the newest commit known here: by this node's workers, including those that have exited and
    those of the previous agent."""


class DecisionInputs(NamedTuple):
    """What the decision on the next generation depends on beside the view: see `Situation`."""

    dead: Dead
    settled: bool
    advance: bool
    blind: bool


class LeadState(msgspec.Struct, frozen=True):
    """What this agent decides as leader, and what it waits for."""

    steady_for: DecisionInputs | None = None
    """With these inputs, and the view as it is, no change was found to be needed; None: not decided since the view."""
    publishing: int = 0
    """Number of the generation whose compare-and-swap is in flight; 0 = none."""
    publishing_since_s: float = 0.0
    publishing_again: bool = False
    """The view had not shown it in time: it was ordered a second time, or more often."""
    min_reached_s: float | None = None
    reason: Text = ""
    """Why the agent waits, shown to users."""
    below_min: bool = False
    halted: bool = False
    """As leader: no step is made, and too few nodes are left to go on."""


class DrainState(msgspec.Struct, frozen=True):
    """How this agent leaves."""

    draining: Text | None = None
    drain_deadline_s: float = float("inf")
    drain_saved: tuple[int, int] = (0, 0)
    """(generation, step) of the newest checkpoint that became durable since the drain was ordered."""
    leaving: Text | None = None
    left: bool = False
    """All workers have ended, and the agent has been told to."""


class IncidentState(msgspec.Struct, frozen=True):
    """The incident in progress, and the last one."""

    incident: Incident | None = None
    """The incident in progress, as far as it is known here."""
    last: AccountFacts | None = None
    """Of the last one that ended."""
    unwritten: bool = False
    """It has not written its account of that, as it did not lead."""
    left_wall_s: float = 0.0
    """When the previous agent of this node was last known to be alive, by its own clock."""


class Agent(msgspec.Struct, frozen=True):
    """All that an agent has learnt, by topic. msgspec structs, since each turn replaces a few fields repeatedly."""

    policy: Policy
    etcd: EtcdState = EtcdState()
    formed: FormedState = FormedState()
    peers: PeerState = PeerState()
    local: LocalState = LocalState()
    progress: ProgressState = ProgressState()
    lead: LeadState = LeadState()
    drain: DrainState = DrainState()
    incidents: IncidentState = IncidentState()


def is_leader(agent: Agent) -> bool:
    """Whether this agent leads the job, as far as it can see."""
    return led_by(agent) == agent.policy.node


def led_by(agent: Agent) -> str | None:
    """The node of the leader; None: no agent is to be seen in etcd."""
    return leader(agent.etcd.view, agent.peers.dead, agent.formed.generation, agent.policy.leader_candidates)
