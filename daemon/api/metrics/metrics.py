"""Metrics for Prometheus, computed from the newest snapshot at each scrape.

The cluster's nodes and jobs are exported by one node each, so that a sum over all daemons counts each once: a job by
the first node of its generation that has a daemon, which is normally that of its leader, else by the node that
registered first.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from elastic.contract.records.job_records import Phase
from elastic.contract.records.ledger import STALL_S, STEP_S, Bucket, Ledger, Spread
from elasticd.api.views import instant, views
from elasticd.api.views.instant import Identity
from elasticd.base import answers
from elasticd.cluster import reconcile
from elasticd.cluster.published_state import Snapshot
from elasticd.machine import doctor

from .observations import Histories, JobHistory, Labelled, Requests, cumulated

NODE_STATES = ("ready", "cordoned", "draining", "unhealthy", "no daemon", "lost", "off")


@dataclass(eq=False)
class FromSnapshot(Collector):
    snapshot: Callable[[], Snapshot]
    identity: Identity
    requests: Requests
    histories: Histories = field(default_factory=Histories)

    def collect(self) -> Iterator[Any]:
        snapshot, now = self.snapshot(), instant.now()
        status = views.status(snapshot, self.identity, now)
        labels = {"version": status.version, "cluster": status.cluster, "node": status.node,
                  "python": platform.python_version(), "torch": doctor.installed("torch")}  # fmt: skip
        yield _gauges("elasticd_build_info", "Constant 1, with versions as labels.", labels, [(labels.values(), 1)])
        age_s = now.monotonic_s - snapshot.turned_s
        yield _gauge("elasticd_registered", "1 while this node is in the cluster.", int(snapshot.registered))
        yield _gauge("elasticd_agents", "Agents that run on this node.", len(snapshot.agents))
        yield _gauge("elasticd_problems", "Active problems that status lists.", len(status.problems))
        yield _gauge("elasticd_loop_age_seconds", "Since the last turn of the loop.", age_s)
        yield from _etcd(status.etcd)
        left = (([each.file], each.expires_wall_s - now.wall_s) for each in snapshot.contact.certificates)
        text = "Until a certificate that this node uses expires."
        yield _gauges("elasticd_certificate_left_seconds", text, ["file"], left)
        yield _histogram("elasticd_etcd_request_duration_seconds", "Requests of this daemon to etcd, retries included.",
                         self.requests.etcd.items(), ("method", "result"))  # fmt: skip
        yield _histogram("elasticd_api_request_duration_seconds", "Requests on the socket, without followed logs.",
                         self.requests.api.items(), ("method", "route", "code"))  # fmt: skip
        yield from _nodes(status.nodes if reconcile.is_oldest(snapshot.cluster, self.identity.node) else [])
        exported = {name for name, job in snapshot.cluster.jobs.items()
                if exporter(snapshot, name) == self.identity.node}  # fmt: skip
        rows = [row for row in status.jobs if row.job in exported]
        yield from job_families(rows, snapshot, self.histories.look(snapshot))


def exporter(snapshot: Snapshot, job: str) -> str:
    """The node whose daemon exports `job`: the first one of its generation that has a daemon, else the oldest."""
    current = snapshot.cluster.jobs[job]
    places = current.generation.nodes if current.generation and not current.over else ()
    there = (place.node for place in places if place.node in snapshot.cluster.nodes)
    return next(there, "") or next(iter(snapshot.cluster.oldest_first), "")


def _etcd(etcd: answers.EtcdContact) -> Iterator[Any]:
    members = etcd.members
    total = len(members) or len(etcd.endpoints)
    up = sum(bool(m.ok) for m in members) if members else total * int(etcd.connected)
    yield _gauge("elasticd_etcd_up", "1 while etcd answers.", int(etcd.connected))
    yield _gauge("elasticd_etcd_contact_age_seconds", "Since etcd last answered.", etcd.age_s)
    yield _gauge("elasticd_etcd_members", "Members of etcd that are configured.", total)
    yield _gauge("elasticd_etcd_members_up", "Members of etcd that answer.", up)
    alarms = (([alarm], int(alarm in etcd.alarms)) for alarm in ("NOSPACE", "CORRUPT"))
    yield _gauges("elasticd_etcd_alarm", "1 for an alarm that etcd has raised.", ["alarm"], alarms)
    sizes = (([member.endpoint], member.database_mb * MB) for member in members)
    yield _gauges("elasticd_etcd_database_bytes", "Size of a member's database.", ["endpoint"], sizes)


def _nodes(rows: Sequence[answers.Node]) -> Iterator[Any]:
    states = (([row.node, state], int(row.state == state)) for row in rows for state in NODE_STATES)
    yield _gauges("elasticd_node_state", "1 for the node's present state.", ["node", "state"], states)
    slots = (([row.node], row.slots) for row in rows)
    yield _gauges("elasticd_node_slots", "Workers that the node can hold.", ["node"], slots)
    used = (([row.node], row.slots_used) for row in rows)
    yield _gauges("elasticd_node_slots_used", "Of those, in use by jobs.", ["node"], used)


Samples = Iterable[tuple[Iterable[str], float | None]]
"""(values of the labels, value); None: no sample."""


def _filled(kind: Any, name: str, text: str, labels: Iterable[str], samples: Samples) -> Any:
    family = kind(name, text, labels=list(labels))
    for values, value in samples:
        if value is not None:
            family.add_metric(list(values), value)
    return family


_gauges = partial(_filled, GaugeMetricFamily)
_counters = partial(_filled, CounterMetricFamily)
"""The name is exported with `_total`."""


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value if value is not None else math.nan)


def _histogram(name: str, text: str, histograms: Iterable[Labelled], labels: tuple[str, ...]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, buckets, total in histograms:
        family.add_metric(values, buckets=buckets, sum_value=total)
    return family


def exposition(
    snapshot: Callable[[], Snapshot], identity: Identity, requests: Requests | None = None
) -> Callable[[], bytes]:
    """A function that returns the text for Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FromSnapshot(snapshot, identity, requests or Requests()))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)


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
    (
        "elasticd_job_last_recovery_seconds",
        "From the last step before the newest incident to the first one after it.",
        ("last_incident", "took_s"),
    ),
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


def job_families(rows: Sequence[answers.Job], snapshot: Snapshot, histories: Mapping[str, JobHistory]) -> Iterator[Any]:
    """`rows`: of the jobs that this node exports. One that is over has its phase and its counters only."""
    jobs = snapshot.cluster.jobs
    phases = (([row.job, str(phase)], int(row.phase == phase)) for row in rows for phase in Phase)
    yield _gauges("elasticd_job_phase", "1 for the job's present phase.", ["job", "phase"], phases)
    live = [row for row in rows if not jobs[row.job].over]
    for name, text, path in GAUGES:
        yield _gauges(name, text, ["job"], (([row.job], _at(row, path)) for row in live))
    memory = (([row.job], row.snapshot.memory_mb * MB if row.snapshot else None) for row in live)
    yield _gauges("elasticd_job_snapshot_bytes", "Memory for snapshots, a node.", ["job"], memory)
    for name, text, path in COUNTERS:
        yield _counters(name, text, ["job"], (([row.job], _at(row, path)) for row in rows))
    yield from _step_times(live)
    names = [row.job for row in rows]
    yield from _ledgers({name: progress.ledger for name in names
                         if (progress := views.newest_progress(snapshot, jobs[name])) and progress.ledger})  # fmt: skip
    spent = ((name, views.rank_time(snapshot, jobs[name], each=False)) for name in names)
    seconds = (([name, bucket], s) for name, time in spent if time for bucket, s in time.rank_seconds.items())
    text = "Time of all ranks by their own agents' accounts, by what it went into."
    yield _counters("elasticd_job_rank_seconds", text, ["job", "bucket"], seconds)
    yield from _histories({name: histories[name] for name in names if name in histories})


def _step_times(rows: Sequence[answers.Job]) -> Iterator[Any]:
    times = [(row.job, row.step_time) for row in rows if row.step_time]
    parts = (([job, part], value) for job, time in times for part, value in time.parts_s.items())
    text = "Mean time of a step lately by part, over the ranks of the leader's node."
    yield _gauges("elasticd_job_step_part_seconds", text, ["job", "part"], parts)
    slow = (([job], len(time.slow_ranks)) for job, time in times)
    yield _gauges("elasticd_job_slow_ranks", "Ranks that are slower than the median of the job.", ["job"], slow)
    ratios = (([job, str(each.rank), each.node], each.ratio) for job, time in times for each in time.slow_ranks)
    text = "A slow rank's own time of a step over the median of the others'."
    yield _gauges("elasticd_job_slow_rank_ratio", text, ["job", "rank", "node"], ratios)
    logged = [([row.job, name], value) for row in rows for name, value in row.logged.items()]
    logged += [([row.job, name], float(value)) for row in rows for name, value in row.logged_not_finite.items()]
    yield _gauges("elasticd_job_logged", "Newest value of each name of job.log.", ["job", "name"], logged)


def _ledgers(ledgers: Mapping[str, Ledger]) -> Iterator[Any]:
    seconds = (
        ([job, bucket.value], ledger.ranks_ms.get(bucket.value, 0) / 1000)
        for job, ledger in ledgers.items()
        for bucket in Bucket
    )
    text = "Time since the job was submitted, summed over its ranks, by what it went into."
    yield _counters("elasticd_job_seconds", text, ["job", "bucket"], seconds)
    steps = (([job], ledger.step) for job, ledger in ledgers.items())
    yield _counters("elasticd_job_steps", "Steps committed, repeated ones once.", ["job"], steps)
    took = [_spread(job, ledger.steps, STEP_S) for job, ledger in ledgers.items()]
    yield _histogram("elasticd_job_step_seconds", "Duration of committed steps.", took, ("job",))
    stalls = [_spread(job, ledger.stalls, STALL_S) for job, ledger in ledgers.items()]
    text = "For how long a snapshot held up training."
    yield _histogram("elasticd_job_checkpoint_stall_seconds", text, stalls, ("job",))


def _spread(job: str, spread: Spread, bounds: Sequence[float]) -> Labelled:
    most = len(bounds) + 1
    counts = [*spread.counts, *[0] * most][:most]  # the job's agents wrote them, and may have written too many
    return (job,), cumulated(bounds, counts), spread.sum_ms / 1000


def _histories(histories: Mapping[str, JobHistory]) -> Iterator[Any]:
    kinds = (([job, kind], n) for job, history in histories.items() for kind, n in sorted(history.incidents.items()))
    text = "Incidents that are over, as seen by this daemon."
    yield _counters("elasticd_job_incidents", text, ["job", "kind"], kinds)
    lost = (([job], history.steps_lost) for job, history in histories.items())
    yield _counters("elasticd_job_steps_lost", "Committed steps lost, at least.", ["job"], lost)
    recovery = [((job, *key), n, total) for job, kept in histories.items() for key, n, total in kept.recovery_s.items()]
    yield _histogram("elasticd_job_recovery_seconds", "From the detection until a phase of the recovery was complete.",
                     recovery, ("job", "phase"))  # fmt: skip
    writes = [((job, *key), n, total) for job, kept in histories.items() for key, n, total in kept.write_s.items()]
    yield _histogram("elasticd_job_checkpoint_write_seconds", "Duration of writing a checkpoint.", writes, ("job",))


def _at(row: answers.Job, path: tuple[str, ...]) -> float | None:
    value: Any = row
    for name in path:
        value = getattr(value, name) if value is not None else None
    return value  # type: ignore[no-any-return]
