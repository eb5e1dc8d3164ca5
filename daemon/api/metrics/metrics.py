"""Metrics for Prometheus, computed from the newest snapshot at each scrape.

The cluster's nodes and jobs are exported by one node each, so that a sum over all daemons counts each once: a job by
the first node of its generation that has a daemon, which is normally that of its leader, else by the node that
registered first.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from elasticd.base import answers
from elasticd.base.answers import Certificate
from elasticd.cluster.published_state import Snapshot
from elasticd.views import views
from elasticd.views.instant import Identity, Now

from .job_metrics import job_families
from .observations import Histograms, Histories, Requests

NODE_STATES = ("ready", "cordoned", "draining", "unhealthy", "no daemon", "lost", "off")


class FromSnapshot(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot], identity: Identity, requests: Requests) -> None:
        self._snapshot = snapshot
        self._identity = identity
        self._requests = requests
        self._histories = Histories()

    def collect(self) -> Iterator[Any]:
        snapshot = self._snapshot()
        now = Now(time.monotonic(), time.time())
        status = views.status(snapshot, self._identity, now)
        histories = self._histories.look(snapshot)
        yield _build(status)
        yield from _daemon(snapshot, status, now)
        yield from _etcd(status.etcd)
        yield _certificates(snapshot.contact.certificates, now)
        yield _histogram("elasticd_etcd_request_duration_seconds", "Requests of this daemon to etcd, retries included.",
                         self._requests.etcd, ("method", "result"))  # fmt: skip
        yield _histogram("elasticd_api_request_duration_seconds", "Requests on the socket, without followed logs.",
                         self._requests.api, ("method", "route", "code"))  # fmt: skip
        yield from _nodes(status.nodes if self._identity.node == first_node(snapshot) else [])
        mine = {name for name, job in snapshot.cluster.jobs.items()
                if exporter(snapshot, name) == self._identity.node}  # fmt: skip
        rows = [row for row in status.jobs if row.job in mine]
        yield from job_families(rows, snapshot.cluster.jobs, histories, snapshot)


def first_node(snapshot: Snapshot) -> str:
    """The node that registered first; '' if there is none."""
    nodes = snapshot.cluster.nodes.values()
    return min(nodes, key=lambda n: (n.create_revision, n.name)).name if nodes else ""


def exporter(snapshot: Snapshot, job: str) -> str:
    """The node whose daemon exports `job`: the first one of its generation that has a daemon, else `first_node`."""
    known = snapshot.cluster.jobs[job]
    places = known.generation.nodes if known.generation and not known.over else ()
    return next((p.node for p in places if p.node in snapshot.cluster.nodes), "") or first_node(snapshot)


def _build(status: answers.Status) -> GaugeMetricFamily:
    labels = {"version": status.version, "cluster": status.cluster, "node": status.node,
              "python": platform.python_version(), "torch": _torch()}  # fmt: skip
    family = GaugeMetricFamily("elasticd_build_info", "Constant 1, with versions as labels.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _torch() -> str:
    """Version of torch beside this daemon, which never imports it; '' if it has none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _daemon(snapshot: Snapshot, status: answers.Status, now: Now) -> Iterator[Any]:
    yield _gauge("elasticd_registered", "1 while this node is in the cluster.", int(snapshot.registered))
    yield _gauge("elasticd_agents", "Agents that run on this node.", len(snapshot.agents))
    yield _gauge("elasticd_problems", "Active problems that status lists.", len(status.problems))
    yield _gauge("elasticd_loop_age_seconds", "Since the last turn of the loop.", now.monotonic_s - snapshot.turned_s)


def _etcd(etcd: answers.EtcdContact) -> Iterator[Any]:
    members = etcd.members
    total = len(members) or len(etcd.endpoints)
    up = sum(bool(m.ok) for m in members) if members else total * int(etcd.connected)
    yield _gauge("elasticd_etcd_up", "1 while etcd answers.", int(etcd.connected))
    yield _gauge("elasticd_etcd_contact_age_seconds", "Since etcd last answered.", etcd.age_s)
    yield _gauge("elasticd_etcd_members", "Members of etcd that are configured.", total)
    yield _gauge("elasticd_etcd_members_up", "Members of etcd that answer.", up)
    alarms = GaugeMetricFamily("elasticd_etcd_alarm", "1 for an alarm that etcd has raised.", labels=["alarm"])
    for alarm in ("NOSPACE", "CORRUPT"):
        alarms.add_metric([alarm], int(alarm in etcd.alarms))
    yield alarms
    sizes = GaugeMetricFamily("elasticd_etcd_database_bytes", "Size of a member's database.", labels=["endpoint"])
    for member in members:
        sizes.add_metric([member.endpoint], member.database_mb * 1e6)
    yield sizes


def _certificates(found: Sequence[Certificate], now: Now) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "elasticd_certificate_left_seconds", "Until a certificate that this node uses expires.", labels=["file"]
    )
    for each in found:
        family.add_metric([each.file], each.expires_wall_s - now.wall_s)
    return family


def _nodes(rows: list[answers.Node]) -> Iterator[Any]:
    states = GaugeMetricFamily("elasticd_node_state", "1 for the node's present state.", labels=["node", "state"])
    slots = GaugeMetricFamily("elasticd_node_slots", "Workers that the node can hold.", labels=["node"])
    used = GaugeMetricFamily("elasticd_node_slots_used", "Of those, in use by jobs.", labels=["node"])
    for row in rows:
        for state in NODE_STATES:
            states.add_metric([row.node, state], int(row.state == state))
        if row.slots is not None:
            slots.add_metric([row.node], row.slots)
        used.add_metric([row.node], row.slots_used)
    yield from (states, slots, used)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value if value is not None else math.nan)


def _histogram(name: str, text: str, found: Histograms, labels: tuple[str, ...]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, one in found.items():
        buckets, total = one.buckets()
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
