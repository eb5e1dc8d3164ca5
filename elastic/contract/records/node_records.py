"""The records in etcd about nodes, what users ask of them, and the cluster's events. See `records`."""

from __future__ import annotations

import msgspec

from .job_records import Record, prepare
from .reasons import Text


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """A worker process on a node, as its daemon publishes it: only what changes no sooner than it is replaced."""

    job: str
    slot: int
    pid: int
    incarnation: int  # how many workers this slot has had before, in its agent's lifetime


class AgentRow(msgspec.Struct, frozen=True, array_like=True):
    """What an agent that is not at work yet does, as its node's daemon publishes it."""

    job: str
    doing: Text
    since_wall_s: float


class NodeFacts(Record, frozen=True, kw_only=True):
    node: str
    hostname: str
    address: str  # where other nodes reach this one
    slots: int  # workers that this node can hold: its GPUs, or its CPU slots
    gpus: int
    version: str


class NodeRecord(NodeFacts, frozen=True, kw_only=True):
    pid: int
    started_wall_s: float
    draining: Text | None = None  # why the node is being drained
    healthy: bool = True
    reason: Text | None = None  # why the node takes no work, if it is not healthy
    workers: tuple[WorkerRow, ...] = ()  # for queries at other nodes; a few seconds old
    agents: tuple[AgentRow, ...] = ()  # those that are starting; a few seconds old, too
    jobs: tuple[str, ...] = ()  # those that have an agent process here, starting, frozen and leaving ones included
    older: dict[str, str] = msgspec.field(default_factory=dict)  # job -> what its agent is of, unless of `version`
    refuses: dict[str, Text] = msgspec.field(default_factory=dict)  # job -> why this node does not run it


class KnownNode(NodeFacts, frozen=True, kw_only=True):
    """The inventory's row of a node, without a lease: what is left of a node whose own record has ended."""

    away_wall_s: float = 0.0
    """When its record ended, by the clock of the daemon that noticed; 0: it is there, or nothing was noticed yet."""
    left: bool = False
    """Its elasticd was stopped in order; else nothing announced that it would go."""

    @staticmethod
    def of(record: NodeRecord, away_wall_s: float = 0.0, left: bool = False) -> KnownNode:
        facts = {name: getattr(record, name) for name in NodeFacts.__struct_fields__ if name != "protocol"}
        return KnownNode(**facts, away_wall_s=away_wall_s, left=left)


class CordonRecord(Record, frozen=True, kw_only=True):
    reason: str
    since_wall_s: float


class DrainRecord(Record, frozen=True, kw_only=True):
    """A user's request to drain the node. Its daemon passes it on to its agents; the node takes no new work."""

    reason: Text
    deadline_s: float = 0.0
    """Seconds, from when the node's daemon sees this, until the node goes away in any case; 0: no deadline."""
    since_wall_s: float


class AskedRecord(Record, frozen=True, kw_only=True):
    """Users' requests to a running job."""

    checkpoint: int = 0
    """Counts requests for a checkpoint; see AgentOrders."""
    sample_step: int = 0
    """Step whose gradients are to be sampled; see AgentOrders."""
    stop: str | None = None
    """Why the job is to stop; None: it is not. Its state says so too, but the job's user can sign another one."""


class EventRecord(Record, frozen=True, kw_only=True):
    """One line of the cluster's time line: see `elasticctl events`."""

    when_wall_s: float
    kind: str  # "job.submitted", "node.drained", "incident.opened", …
    job: str = ""
    node: str = ""
    user: str = ""  # of a request; "": made by elasticd itself
    uid: int | None = None
    pid: int | None = None
    text: str = ""


prepare(NodeRecord, KnownNode, CordonRecord, DrainRecord, AskedRecord, EventRecord)
