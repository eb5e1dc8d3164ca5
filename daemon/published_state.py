"""What the daemon knows, as one immutable picture per turn of the loop: written by the loop, read by everyone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic.core.agentfile import AgentStatus
from elastic.etcd import MemberHealth

from .assignment import Assignment
from .cluster import Cluster


@dataclass(frozen=True, slots=True)
class LocalAgent:
    job: str
    pid: int
    slots: int
    status: AgentStatus | None
    draining: str | None


@dataclass(frozen=True, slots=True)
class Contact:
    """How things stand with etcd."""

    connected: bool = False
    as_of_s: float = float("-inf")
    """Monotonic instant of the last confirmation; -inf: never."""
    error: str = ""
    version: str = ""
    alarms: tuple[str, ...] = ()
    """What etcd itself has raised alarm about: 'NOSPACE', 'CORRUPT'."""
    members: tuple[MemberHealth, ...] = ()
    """Each configured member by itself; empty: not asked yet, or embedded."""
    anonymous: bool = False
    """Whether it is known to take writes from anyone: no password, no client certificate."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    cluster: Cluster = field(default_factory=Cluster)
    contact: Contact = Contact()
    plan: Assignment = field(default_factory=Assignment)
    agents: Mapping[str, LocalAgent] = field(default_factory=dict)
    trouble: Mapping[str, str] = field(default_factory=dict)
    """Job -> what went wrong with its agent here."""
    registered: bool = False
    stays_out: str = ""
    """Why this node takes no part in the cluster; empty: it does."""
    turn: int = 0
    turned_s: float = field(default_factory=time.monotonic)


class PublishedState:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = Snapshot()

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
