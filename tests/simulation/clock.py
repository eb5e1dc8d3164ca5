"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

MOST = 50_000
"""No history has as many things to happen as this."""


class Clock:
    """Instants are virtual seconds. Nothing happens but in `run`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._done = 0

    def at(self, when_s: float, act: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._due, (max(when_s, self.now_s), self._count, act, args))

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.at(self.now_s + delay_s, act, *args)

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let everything due by `until_s` happen, or until `stop()` says so."""
        due = self._due
        while due and due[0][0] <= until_s:
            self.now_s, _, act, args = heapq.heappop(due)
            self._done += 1
            if self._done > MOST:
                raise AssertionError(f"livelock: {MOST} things have happened by {self.now_s:.3f} s, next is {act}")
            act(*args)
            if stop():
                return
        self.now_s = max(self.now_s, until_s)
