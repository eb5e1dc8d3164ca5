"""What this daemon has observed since it started, for /metrics: its own requests, and what became of the jobs."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot

Buckets = list[tuple[str, float]]
"""(upper bound, observations up to it), as Prometheus takes them."""
Labelled = tuple[tuple[str, ...], Buckets, float]
"""(values of the labels, buckets, sum)."""


def cumulated(bounds: Sequence[float], counts: Iterable[int]) -> Buckets:
    """`counts`: between the bounds, and beyond the last one."""
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return [(name, float(count)) for name, count in zip(names, itertools.accumulate(counts), strict=True)]


class Histograms:
    """Histograms of one metric, by the values of its labels. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds, ascending, without infinity."""
        self._bounds = bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: Counter[tuple[str, ...]] = Counter()
        self._lock = threading.Lock()

    def observe(self, value: float, *labels: str) -> None:
        """Numbers that are not finite, as a record may hold, are left out."""
        if math.isfinite(value):
            with self._lock:
                counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
                counts[bisect.bisect_left(self._bounds, value)] += 1
                self._sums[labels] += value  # type: ignore[assignment]

    def items(self) -> list[Labelled]:
        with self._lock:
            return [(key, cumulated(self._bounds, n), self._sums[key]) for key, n in sorted(self._counts.items())]


REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RECOVERY_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WRITE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

PHASES = {"published", "aborted", "synced", "stepping"}
"""Marks in an incident's time line: seconds from the detection on."""


class Requests:
    """Durations of requests, from any thread."""

    def __init__(self) -> None:
        self.api = Histograms(REQUEST_S)
        """By method, route and status."""
        self.etcd = Histograms(REQUEST_S)
        """By gRPC method and outcome."""

    def etcd_called(self, method: str, seconds: float, error: str) -> None:
        self.etcd.observe(seconds, method, error or "ok")


@dataclass
class JobHistory:
    """Of one job, as far as this daemon has seen it."""

    incidents: Counter[str] = field(default_factory=Counter)
    """By kind, those that are over."""
    steps_lost: int = 0
    """At least so many."""
    recovery_s: Histograms = field(default_factory=lambda: Histograms(RECOVERY_S))
    """By phase."""
    write_s: Histograms = field(default_factory=lambda: Histograms(WRITE_S))
    submitted: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    """Ids of the incidents that are counted already -> the lost steps that are. The kind may change after the end, when
    another agent reports what the cause was."""
    saved_step: int = -1


class Histories:
    """Call `look` with each snapshot that is exported. etcd keeps a job's last incidents only: this keeps their sum."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobHistory] = {}
        self._lock = threading.Lock()

    def look(self, snapshot: Snapshot) -> dict[str, JobHistory]:
        with self._lock:
            jobs = snapshot.cluster.jobs
            for gone in self._jobs.keys() - jobs.keys():
                if snapshot.contact.connected:
                    del self._jobs[gone]
            for name, job in jobs.items():
                history = self._jobs.setdefault(name, JobHistory(submitted=job.submitted))
                if job.submitted and history.submitted not in (0, job.submitted):  # another job of the same name
                    history = self._jobs[name] = JobHistory()
                history.submitted = job.submitted or history.submitted
                self._learn(history, job)
            return dict(self._jobs)

    @staticmethod
    def _learn(known: JobHistory, job: Job) -> None:
        over = {i.id: i for i in job.incidents if not i.open}
        lost = {key: max(incident.steps_lost or 0, known.seen.get(key, 0)) for key, incident in over.items()}
        for key, incident in over.items():
            if key not in known.seen:
                known.incidents[incident.kind] += 1
                for phase in PHASES & incident.timeline_s.keys():
                    known.recovery_s.observe(incident.timeline_s[phase], phase)
            known.steps_lost += lost[key] - known.seen.get(key, 0)
        known.seen = lost
        progress = job.progress
        if progress is not None and progress.checkpoint_write_s and progress.checkpoint_step is not None:
            if progress.checkpoint_step > known.saved_step:
                known.write_s.observe(progress.checkpoint_write_s)
            known.saved_step = progress.checkpoint_step
