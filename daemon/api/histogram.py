"""A histogram for /metrics, without the import of prometheus-client: that is loaded at the first scrape."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Iterable


class Histogram:
    """Counts observations by upper bound. Thread-safe."""

    def __init__(self, bounds: Iterable[float]) -> None:
        """`bounds`: upper bounds, ascending, without infinity."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Numbers that are not finite, as a record may hold, are left out."""
        if not math.isfinite(value):
            return
        with self._lock:
            self._counts[bisect.bisect_left(self.bounds, value)] += 1
            self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """([(upper bound, observations up to it)], sum of all), as Prometheus takes them."""
        with self._lock:
            total, counts = self._sum, list(itertools.accumulate(self._counts))
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, counts, strict=True)], total


class Histograms:
    """Histograms of one metric, by the values of its labels; created when first observed."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(bounds)
        self._known: dict[tuple[str, ...], Histogram] = {}
        self._lock = threading.Lock()

    def observe(self, value: float, *labels: str) -> None:
        with self._lock:
            known = self._known.setdefault(labels, Histogram(self._bounds))
        known.observe(value)

    def items(self) -> list[tuple[tuple[str, ...], Histogram]]:
        with self._lock:
            return sorted(self._known.items())
