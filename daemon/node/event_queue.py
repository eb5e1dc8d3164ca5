"""The loop's event queue: all events in order, but only the newest view of etcd."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from elastic.contract.records.node_records import NodeRecord
from elastic.etcd.client import Lease, View
from elasticd.agents.agents import Gone


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    lease: Lease
    record: NodeRecord


@dataclass(frozen=True, slots=True)
class Updated:
    """`record`, a newer one, has replaced it."""

    lease: int
    record: NodeRecord


@dataclass(frozen=True, slots=True)
class NodeLeaseLost:
    lease: int
    why: str


@dataclass(frozen=True, slots=True)
class Written:
    """The writer has finished `name`; `error` is empty on success."""

    name: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    why: str
    code: int = 0


Event = Gone | NodeRegistered | Updated | NodeLeaseLost | Written | Stop


class EventQueue:
    """Filled by any thread, drained by one. The events are bounded by what the node runs: agents, writes, a lease."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._events: deque[Event] = deque()
        self._view: View | None = None

    def post(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify()

    def show(self, view: View) -> None:
        """A newer view replaces one that was not taken yet."""
        with self._news:
            self._view = view
            self._news.notify()

    def take(self, timeout_s: float) -> tuple[list[Event], View | None]:
        """The events and view received; waits up to `timeout_s` for one."""
        with self._news:
            self._news.wait_for(lambda: self._events or self._view is not None, timeout_s)
            events, view = list(self._events), self._view
            self._events.clear()
            self._view = None
            return events, view
