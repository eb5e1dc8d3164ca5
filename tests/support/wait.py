"""Waiting in tests: always with a deadline, and a miss raises. A helper that returned False would pass unseen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STRETCHED_MOST_S = 60.0
"""Up to this a busy machine makes deadlines longer: beyond it pytest's own limit for a test comes first."""
POLL_MOST_S = 0.06
"""The longest pause between two looks, unless a test wants a longer one: most looks ask a daemon or read files."""


def stretched(deadline_s: float, load: float | None = None) -> float:
    """`deadline_s` for a machine with a free core for each process that wants one; as many times as long where `load`
    processes (default: the last minute's average) share the cores."""
    crowd = (os.getloadavg()[0] if load is None else load) / (os.cpu_count() or 1)
    return max(deadline_s, min(deadline_s * crowd, STRETCHED_MOST_S))


def eventually(check: Callable[[], T], deadline_s: float, what: str = "", every_s: float = 0.02) -> T:
    """Call `check` until it returns something true, and return that.

    A check may also use `assert`: its AssertionError counts as "not yet". `deadline_s` is a length, in seconds; see
    `stretched`. Raises AssertionError, with what was seen last, when the time is up; other exceptions of `check` pass
    through. It is called every `every_s` at first, and less often, up to POLL_MOST_S, the longer it takes.
    """
    began_s = time.monotonic()
    while True:
        try:
            seen: object = (value := check())
            if value:
                return value
        except AssertionError as error:
            seen = error
        waited_s = time.monotonic() - began_s
        if waited_s >= deadline_s and waited_s >= stretched(deadline_s):
            raise AssertionError(f"not within {deadline_s:g} s: {what or check}; seen last: {seen!r}")
        time.sleep(max(every_s, min(waited_s / 20, POLL_MOST_S)))


def holds(check: Callable[[], object], for_s: float, what: str = "", every_s: float = 0.02) -> None:
    """Assert that `check` stays true for `for_s` seconds."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        seen = check()
        assert seen, f"did not hold for {for_s:g} s: {what or check}; seen: {seen!r}"
        time.sleep(every_s)
