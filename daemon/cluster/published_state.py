"""The daemon's state, as one immutable snapshot per turn of the loop: written by the loop, read by all threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic.contract.agent_files import AgentStatus
from elastic.contract.records.node_records import AskedRecord
from elastic.contract.records.reasons import Text
from elastic.etcd.client import MemberHealth
from elasticd.base.answers import Certificate

from .assignment import Assignment
from .cluster import Cluster


@dataclass(frozen=True, slots=True)
class LocalAgent:
    job: str
    pid: int
    slots: int
    status: AgentStatus | None
    draining: Text | None


@dataclass(frozen=True, slots=True)
class Contact:
    connected: bool = False
    as_of_s: float = float("-inf")
    """Monotonic time of the last confirmation; -inf: never."""
    error: str = ""
    version: str = ""
    alarms: tuple[str, ...] = ()
    """Alarms raised by etcd: 'NOSPACE', 'CORRUPT'."""
    members: tuple[MemberHealth, ...] = ()
    """Status of each configured member; empty: not queried yet, or embedded."""
    certificates: tuple[Certificate, ...] = ()
    """Those that this node uses."""
    anonymous: bool = False
    """Whether it is known to accept anonymous writes: no password, no client certificate."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    cluster: Cluster = field(default_factory=Cluster)
    contact: Contact = Contact()
    plan: Assignment = field(default_factory=Assignment)
    agents: Mapping[str, LocalAgent] = field(default_factory=dict)
    trouble: Mapping[str, str] = field(default_factory=dict)
    """Job that has a place here -> the last failure of its agent."""
    registered: bool = False
    stays_out: str = ""
    """Why this node does not join the cluster; empty: it does."""
    turn: int = 0
    turned_s: float = field(default_factory=time.monotonic)


class PublishedState:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = Snapshot()
        self.told_to_stop: dict[str, tuple[str, AskedRecord]] = {}
        """Job -> submission and order; `ClusterReader` keeps it."""

    @property
    def now(self) -> Snapshot:
        return self._snapshot

    def publish(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def wait(self, until: Callable[[Snapshot], object], timeout_s: float) -> Snapshot:
        """The first snapshot for which `until` holds, or the newest one when the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: until(self._snapshot), timeout_s)
            return self._snapshot
