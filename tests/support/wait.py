"""Waiting in tests: always with a deadline, and a miss raises. A helper that returned False would pass unseen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], deadline_s: float, what: str = "", every_s: float = 0.02) -> T:
    """Call `check` until it returns something true, and return that.

    A check may also use `assert`: its AssertionError counts as "not yet". `deadline_s` is a length, in seconds.
    Raises AssertionError, with what was seen last, when the time is up; other exceptions of `check` pass through.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        try:
            seen: object = (value := check())
            if value:
                return value
        except AssertionError as error:
            seen = error
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what or check}; seen last: {seen!r}")
        time.sleep(every_s)


def holds(check: Callable[[], object], for_s: float, what: str = "", every_s: float = 0.02) -> None:
    """Assert that `check` stays true for `for_s` seconds."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        seen = check()
        assert seen, f"did not hold for {for_s:g} s: {what or check}; seen: {seen!r}"
        time.sleep(every_s)
