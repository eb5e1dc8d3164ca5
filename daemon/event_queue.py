"""Where the loop hears of everything: events one by one, of etcd's pictures only the newest."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from elastic.core.records import NodeRecord
from elastic.etcd import Lease, View

from .agents import Gone


@dataclass(frozen=True, slots=True)
class Registered:
    """Our node record stands in etcd under `lease`."""

    lease: Lease
    record: NodeRecord


@dataclass(frozen=True, slots=True)
class Updated:
    """`record`, a newer one, stands there in its place."""

    lease: int
    record: NodeRecord


@dataclass(frozen=True, slots=True)
class LeaseLost:
    lease: int
    why: str


@dataclass(frozen=True, slots=True)
class Written:
    """The writer is done with `name`; `error` is empty when it went well."""

    name: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    why: str
    code: int = 0


Event = Gone | Registered | Updated | LeaseLost | Written | Stop


class EventQueue:
    """Filled by any thread, emptied by one. The events are bounded by what the node runs: agents, writes, a lease."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._events: deque[Event] = deque()
        self._view: View | None = None

    def post(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify()

    def show(self, view: View) -> None:
        """A newer picture replaces one that was not looked at yet."""
        with self._news:
            self._view = view
            self._news.notify()

    def take(self, timeout_s: float) -> tuple[list[Event], View | None]:
        """What has come; waits up to `timeout_s` for something."""
        with self._news:
            self._news.wait_for(lambda: self._events or self._view is not None, timeout_s)
            events, view = list(self._events), self._view
            self._events.clear()
            self._view = None
            return events, view
