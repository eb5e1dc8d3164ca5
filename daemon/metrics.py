"""Prometheus metrics: a few gauges, computed from the newest snapshot on each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from elastic.core.records import Phase

from . import views
from .published_state import Snapshot

JOB_GAUGES = (
    ("elasticd_job_step", "Newest committed step.", ("step",)),
    ("elasticd_job_steps_per_second", "Steps per second lately.", ("steps_per_s",)),
    ("elasticd_job_loss", "Loss of the newest step that reported one.", ("loss",)),
    ("elasticd_job_world_size", "Ranks of the present generation.", ("world_size",)),
    ("elasticd_job_generation", "Number of the present generation.", ("generation",)),
    ("elasticd_job_nodes", "Member nodes.", ("members",)),
    ("elasticd_job_restarts", "Failures charged over the job's life.", ("restarts",)),
    ("elasticd_job_incidents", "Incidents over the job's life.", ("incidents",)),
    ("elasticd_job_last_incident_seconds", "Duration of the newest recovery.", ("last_incident", "took_s")),
    ("elasticd_job_no_progress_seconds", "While no step is made: for how long; else absent.", ("no_progress", "for_s")),
    ("elasticd_job_checkpoint_age_seconds", "Age of the newest checkpoint.", ("checkpoint", "age_s")),
    ("elasticd_job_checkpoint_step", "Step of the newest checkpoint.", ("checkpoint", "step")),
    ("elasticd_job_checkpoint_failed", "1 while the newest checkpoint failed.", ("checkpoint", "failed")),
    ("elasticd_job_snapshot_step", "Step of the newest snapshot in memory.", ("snapshot", "step")),
    ("elasticd_job_snapshot_megabytes", "Memory for snapshots, a node.", ("snapshot", "memory_mb")),
    ("elasticd_job_checkpoint_skipped", "Due while another was still being written.", ("checkpoint", "skipped")),
)
"""Name, help, and path of the value in the job's row."""


class FromSnapshot(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot], identity: views.Identity) -> None:
        self._snapshot = snapshot
        self._identity = identity

    def collect(self) -> Iterator[Any]:
        snapshot = self._snapshot()
        now = views.Now(time.monotonic(), time.time())
        status = views.status(snapshot, self._identity, now)
        labels = {"version": status["version"], "cluster": status["cluster"], "node": status["node"]}
        yield InfoMetricFamily("elasticd", "This daemon.", value=labels)
        yield _gauge("elasticd_etcd_up", "1 while etcd answers.", int(status["etcd"]["connected"]))
        yield _gauge("elasticd_etcd_age_seconds", "Since etcd last answered.", status["etcd"]["age_s"])
        yield _gauge("elasticd_registered", "1 while this node is in the cluster.", int(snapshot.registered))
        yield _gauge("elasticd_agents", "Agents that run on this node.", len(snapshot.agents))
        yield _gauge("elasticd_problems", "Things that want a person's attention.", len(status["problems"]))
        yield _gauge("elasticd_loop_age_seconds", "Since the loop's last turn.", now.monotonic_s - snapshot.turned_s)
        states = GaugeMetricFamily("elasticd_node_ready", "1 for a node that takes work.", labels=["node"])
        for row in status["nodes"]:
            states.add_metric([row["node"]], int(row["state"] == "ready"))
        yield states
        phases = GaugeMetricFamily("elasticd_job_phase", "1 for the job's present phase.", labels=["job", "phase"])
        for row in status["jobs"]:
            for phase in Phase:
                phases.add_metric([row["job"], str(phase)], int(row["phase"] == phase))
        yield phases
        for name, text, path in JOB_GAUGES:
            family = GaugeMetricFamily(name, text, labels=["job"])
            for row in status["jobs"]:
                if (number := _at(row, path)) is not None:
                    family.add_metric([row["job"]], float(number))
            yield family


def _at(row: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        row = row[name] if row is not None else None
    return row


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value if value is not None else float("nan"))


def exposition(snapshot: Callable[[], Snapshot], identity: views.Identity) -> Callable[[], bytes]:
    """A function that returns the text for Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FromSnapshot(snapshot, identity))
    return lambda: generate_latest(registry)
