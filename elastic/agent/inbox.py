"""Events for the agent's loop, from any thread."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator

from elastic.etcd.client import View
from elastic.recovery.machine.events import Event


class Inbox:
    """`readable` becomes readable when an event was posted."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | View] = queue.SimpleQueue()
        self.readable, self._wake = socket.socketpair()
        self.readable.setblocking(False)
        self._wake.setblocking(False)
        self._woken = False
        """A wake-up has been sent and not yet received."""

    def post(self, event: Event | View) -> None:
        self._events.put(event)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):
                self._wake.send(b"x")

    def awake(self) -> None:
        """Call it before the events are taken: one that is posted meanwhile wakes the loop again."""
        with contextlib.suppress(BlockingIOError):
            self.readable.recv(4096)
        self._woken = False

    def taken(self) -> Iterator[Event | View]:
        """All that have been posted, oldest first."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def close(self) -> None:
        self.readable.close()
        self._wake.close()
