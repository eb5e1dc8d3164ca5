"""Lists, ages and times of day in words, as all texts of the daemon and of elasticctl have them. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

MOST = 8
"""So many are named of a list."""


def some(named: Collection[object], most: int = MOST) -> str:
    """'a, b, c and 5 more'."""
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return ", ".join(map(str, list(named)[:most])) + more


def ranks(numbers: Iterable[int]) -> str:
    """'rank 1', 'ranks 0 to 3', 'ranks 0, 2 and 5 more'; '' for none."""
    ordered = sorted(set(numbers))
    if len(ordered) < 2:
        return f"rank {ordered[0]}" if ordered else ""
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {some(ordered)}"


def age(seconds: float, form: str = ".0f") -> str:
    """'12 s', '3 min', '2 h', '5 d'. `form`: of what is not in seconds."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:{form}} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def clock(wall_s: float, form: str = "%H:%M:%S", odd: str = "an unknown time") -> str:
    """The local time; `odd`: in place of one that is no date. A record may hold any number."""
    try:
        return time.strftime(form, time.localtime(wall_s))
    except (OverflowError, ValueError, OSError):
        return odd
