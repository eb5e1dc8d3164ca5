"""What a rank's steps consist of, as its agent publishes it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from .numbers import Int, Real

WINDOWS = 3
"""A rank is slow if it was so in this many windows one after the other."""
SLOWER = 1.3
LEAST_S = 0.001
"""Differences below this are not a slow rank's."""


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of a step over a window. None: not measured, as the host does not wait for a GPU's work."""

    step_s: Real
    """From commit to commit."""
    data_s: Real
    """Until the next batch was there, in `job.batches` and `job.streams`."""
    compute_s: Real | None
    """The script's own code: forward, backward and all else, up to the last gradient."""
    collectives_s: Real | None
    """From the last own contribution until all others' have arrived: waiting for the slowest rank, and moving bytes."""
    optimizer_s: Real | None
    """From the optimizer's step to the commit."""
    snapshot_s: Real
    """Standing still for a snapshot; a copy beside the training is not counted."""


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose own work takes longer than that of the other ranks of its node, or of the job."""

    rank: Int
    node: str
    ratio: Real
    """Its own time of a step over the median of the others'."""


def slow_ranks(windows: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    """(rank, its time over the median of the others' in the newest window) of each rank that was slower than the others
    by the factor SLOWER in all of the last WINDOWS `windows`, which map ranks to their own time of a step."""
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS:
        return []
    slow = []
    for rank in sorted(set.intersection(*(set(window) for window in last))):
        ratios = [_ratio(window, rank) for window in last]
        if all(ratio >= SLOWER for ratio in ratios):
            slow.append((rank, round(ratios[-1], 2)))
    return slow


def _ratio(window: Mapping[int, float], rank: int) -> float:
    others = [seconds for other, seconds in window.items() if other != rank]
    if not others:
        return 0.0
    median = statistics.median(others)
    return window[rank] / max(median, 1e-6) if window[rank] - median >= LEAST_S else 0.0
