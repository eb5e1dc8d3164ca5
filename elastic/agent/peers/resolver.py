"""Resolves host names outside the calling thread: a name server that does not answer delays its own names only."""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

MOST_AT_ONCE = 8

Address = tuple[str, int]
"""Host, by name or number, and port."""

Found = list[Any]
"""As getaddrinfo returns it; empty: the name does not resolve now."""


def numeric(address: Address) -> Found:
    """Addresses of a numeric host, without a look-up. Empty for a name."""
    try:
        return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []


class Resolver:
    """Owned by one thread; `wake` is called in another one when an answer is ready.

    Each look-up has a thread of its own, which ends with it: glibc sets a thread's resolver up at its first look-up,
    which may be the very moment at which a store is opened with DNS disabled (`store`).
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[Address] = deque()
        self._asked: set[Address] = set()
        self._running = 0
        self._answers: queue.SimpleQueue[tuple[Address, Found]] = queue.SimpleQueue()

    def ask(self, address: Address) -> None:
        """Start a look-up, unless one of this address is under way."""
        if address not in self._asked:
            self._asked.add(address)
            self._waiting.append(address)
            self._go_on()

    def answers(self) -> list[tuple[Address, Found]]:
        """Answers that have arrived since the last call. Never blocks."""
        taken = []
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                break
            self._running -= 1
            self._asked.discard(answer[0])
            taken.append(answer)
        self._go_on()
        return taken

    def _go_on(self) -> None:
        while self._waiting and self._running < MOST_AT_ONCE:
            address = self._waiting.popleft()
            self._running += 1
            try:
                threading.Thread(target=self._look, args=[address], name="elastic-lookup", daemon=True).start()
            except RuntimeError:  # no thread can be started: as if the name did not resolve now
                self._answer(address, [])

    def _look(self, address: Address) -> None:
        try:
            found: Found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # unknown, or not a valid name
            found = []
        self._answer(address, found)

    def _answer(self, address: Address, found: Found) -> None:
        self._answers.put((address, found))
        self._wake()
