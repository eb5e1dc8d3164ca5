"""Metrics of jobs, from their rows in status, their ledgers and what this daemon has seen of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from elastic.contract.records.job_records import Phase
from elastic.contract.records.ledger import STALL_S, STEP_S, Bucket, Ledger, Spread
from elasticd.base import answers
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot
from elasticd.views import views

from .observations import JobHistory

MB = 1e6

GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("elasticd_job_step", "Newest committed step.", ("step",)),
    ("elasticd_job_steps_per_second", "Steps per second lately.", ("steps_per_s",)),
    ("elasticd_job_loss", "Loss of the newest step that reported one.", ("loss",)),
    ("elasticd_job_world_size", "Ranks of the present generation.", ("world_size",)),
    ("elasticd_job_generation", "Number of the present generation.", ("generation",)),
    ("elasticd_job_nodes", "Nodes with a living agent.", ("members",)),
    ("elasticd_job_queue_position", "Place in the queue of a job that waits for its nodes.", ("queue_position",)),
    ("elasticd_job_progress_age_seconds", "Since progress was last reported.", ("progress_age_s",)),
    ("elasticd_job_last_recovery_seconds", "Duration of the newest recovery.", ("last_incident", "took_s")),
    ("elasticd_job_no_progress_seconds", "While no step is made: for how long; else absent.", ("no_progress", "for_s")),
    ("elasticd_job_checkpoint_age_seconds", "Age of the newest checkpoint.", ("checkpoint", "age_s")),
    ("elasticd_job_checkpoint_step", "Step of the newest checkpoint.", ("checkpoint", "step")),
    ("elasticd_job_checkpoint_failed", "1 while the newest checkpoint failed.", ("checkpoint", "failed")),
    ("elasticd_job_snapshot_step", "Step of the newest snapshot in memory.", ("snapshot", "step")),
    ("elasticd_job_goodput_ratio", "Share of its time in which the job made steps that count.", ("goodput", "goodput")),
)
"""Name, help and path of the value in the row of a job that is not over; null: no sample."""

COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("elasticd_job_restarts", "Failures charged to the restart budget.", ("restarts",)),
    ("elasticd_job_checkpoints_skipped", "Due while another was still being written.", ("checkpoint", "skipped")),
)
"""The name is exported with `_total`."""


def job_families(
    rows: Sequence[answers.Job], jobs: Mapping[str, Job], histories: Mapping[str, JobHistory], snapshot: Snapshot
) -> Iterator[Any]:
    """`rows`: of the jobs that this node exports. One that is over has its phase and its counters only."""
    phases = GaugeMetricFamily("elasticd_job_phase", "1 for the job's present phase.", labels=["job", "phase"])
    for row in rows:
        for phase in Phase:
            phases.add_metric([row.job, str(phase)], int(row.phase == phase))
    yield phases
    live = [row for row in rows if not jobs[row.job].over]
    for name, text, path in GAUGES:
        yield _filled(GaugeMetricFamily(name, text, labels=["job"]), live, path)
    memory = GaugeMetricFamily("elasticd_job_snapshot_bytes", "Memory for snapshots, a node.", labels=["job"])
    yield _filled(memory, live, ("snapshot", "memory_mb"), MB)
    for name, text, path in COUNTERS:
        yield _filled(CounterMetricFamily(name, text, labels=["job"]), rows, path)
    yield from _step_times(live)
    names = [row.job for row in rows]
    yield from _ledgers({name: progress.ledger for name in names
                         if (progress := views.newest_progress(snapshot, jobs[name])) and progress.ledger})  # fmt: skip
    yield from _rank_times({name: summed for name in names
                            if (summed := views.rank_time(snapshot, jobs[name], each=False))})  # fmt: skip
    yield from _histories({name: histories[name] for name in names if name in histories})


def _step_times(rows: Sequence[answers.Job]) -> Iterator[Any]:
    parts = GaugeMetricFamily(
        "elasticd_job_step_part_seconds", "Mean time of a step lately by part, over the ranks of the leader's node.",
        labels=["job", "part"],
    )  # fmt: skip
    logged = GaugeMetricFamily("elasticd_job_logged", "Newest value of each name of job.log.", labels=["job", "name"])
    slow = GaugeMetricFamily(
        "elasticd_job_slow_ranks", "Ranks that are slower than the median of the job.", labels=["job"]
    )
    ratio = GaugeMetricFamily(
        "elasticd_job_slow_rank_ratio", "A slow rank's own time of a step over the median of the others'.",
        labels=["job", "rank", "node"],
    )  # fmt: skip
    for row in rows:
        values: dict[str, float | str] = {**row.logged, **row.logged_not_finite}
        for name, newest in values.items():
            logged.add_metric([row.job, name], float(newest))
        if (known := row.step_time) is None:
            continue
        for part, value in known.parts_s.items():
            if value is not None:
                parts.add_metric([row.job, part], value)
        slow.add_metric([row.job], len(known.slow_ranks))
        for each in known.slow_ranks:
            ratio.add_metric([row.job, str(each.rank), each.node], each.ratio)
    yield from (parts, slow, ratio, logged)


def _ledgers(ledgers: Mapping[str, Ledger]) -> Iterator[Any]:
    seconds = CounterMetricFamily(
        "elasticd_job_seconds", "Time since the job was submitted, summed over its ranks, by what it went into.",
        labels=["job", "bucket"],
    )  # fmt: skip
    steps = CounterMetricFamily("elasticd_job_steps", "Steps committed, repeated ones once.", labels=["job"])
    took = HistogramMetricFamily("elasticd_job_step_seconds", "Duration of committed steps.", labels=["job"])
    stalls = HistogramMetricFamily(
        "elasticd_job_checkpoint_stall_seconds", "For how long a snapshot held up training.", labels=["job"]
    )
    for name, ledger in ledgers.items():
        for bucket in Bucket:
            seconds.add_metric([name, bucket.value], ledger.ranks_ms.get(bucket.value, 0) / 1000)
        steps.add_metric([name], ledger.step)
        _spread(took, name, ledger.steps, STEP_S)
        _spread(stalls, name, ledger.stalls, STALL_S)
    yield from (seconds, steps, took, stalls)


def _rank_times(summed: Mapping[str, answers.RankTime]) -> Iterator[Any]:
    seconds = CounterMetricFamily(
        "elasticd_job_rank_seconds", "Time of all ranks by their own agents' accounts, by what it went into.",
        labels=["job", "bucket"],
    )  # fmt: skip
    for name, known in summed.items():
        for bucket, spent_s in known.rank_seconds.items():
            seconds.add_metric([name, bucket], spent_s)
    yield seconds


def _spread(family: HistogramMetricFamily, job: str, spread: Spread, bounds: Sequence[float]) -> None:
    most = len(bounds) + 1
    counts = [*spread.counts, *[0] * most][:most]  # the job's agents wrote them, and may have written too many
    total, buckets = 0, []
    for bound, count in zip([*(f"{b:g}" for b in bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    family.add_metric([job], buckets=buckets, sum_value=spread.sum_ms / 1000)


def _histories(histories: Mapping[str, JobHistory]) -> Iterator[Any]:
    incidents = CounterMetricFamily(
        "elasticd_job_incidents", "Incidents that are over, as seen by this daemon.", labels=["job", "kind"]
    )
    lost = CounterMetricFamily("elasticd_job_steps_lost", "Committed steps lost, at least.", labels=["job"])
    recovery = HistogramMetricFamily(
        "elasticd_job_recovery_seconds", "From the detection until a phase of the recovery was complete.",
        labels=["job", "phase"],
    )  # fmt: skip
    write = HistogramMetricFamily(
        "elasticd_job_checkpoint_write_seconds", "Duration of writing a checkpoint.", labels=["job"]
    )
    for name, known in histories.items():
        for kind, count in sorted(known.incidents.items()):
            incidents.add_metric([name, kind], count)
        lost.add_metric([name], known.steps_lost)
        for family, found in ((recovery, known.recovery_s), (write, known.write_s)):
            for labels, one in found.items():
                buckets, total = one.buckets()
                family.add_metric([name, *labels], buckets=buckets, sum_value=total)
    yield from (incidents, lost, recovery, write)


def _filled(family: Any, rows: Sequence[answers.Job], path: tuple[str, ...], factor: float = 1.0) -> Any:
    for row in rows:
        value: Any = row
        for name in path:
            value = getattr(value, name) if value is not None else None
        if value is not None:
            family.add_metric([row.job], value * factor)
    return family
