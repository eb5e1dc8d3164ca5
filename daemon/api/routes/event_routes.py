"""The answer of `GET /v1/events`: the cluster's time line, as it is or followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from elastic.contract.records.node_records import EventRecord
from elasticd.api import request
from elasticd.api.actions import check_known, checked, job_of
from elasticd.api.request import Query, Request
from elasticd.api.views import views
from elasticd.api.views.instant import now
from elasticd.base import answers
from elasticd.base.answers import Json
from elasticd.cluster.cluster import Cluster
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis import timeline

FOLLOW_S = 1.0
"""Longest time between two looks at whether the client is still there."""


def chosen(cluster: Cluster, job: str, node: str, since_wall_s: float) -> Iterator[tuple[str, EventRecord]]:
    """(key, event), oldest first. A node's events include those of jobs that name it."""
    for key in sorted(cluster.events):
        for event in timeline.read({key: cluster.events[key]}):
            named = node in ("", event.node) or node in event.node.split(", ")
            if named and job in ("", event.job) and event.when_wall_s >= since_wall_s:
                yield key, event


def listed(cluster: Cluster, job: str, node: str, since_wall_s: float, last: int) -> list[answers.Event]:
    """The newest `last` of those chosen; 0: all of them."""
    return [timeline.answer(event) for _, event in chosen(cluster, job, node, since_wall_s)][-last:]


def get_events(h: Request, query: Query) -> Json | None:
    """Raises Refused: 400 for what can be no name, 404 for a job or node that is not there and that no event names; ''
    is any."""
    published, job, node = h.service.published, query.get("job", ""), query.get("node", "")
    since_wall_s, last = request.seconds(query, "since_wall_s"), request.count(query, "last", 0)
    snapshot = published.now
    cluster = snapshot.cluster
    for field, name in (("job", job), ("node", node)):
        checked(field, name or "any")
    if job and not any(chosen(cluster, job, "", 0.0)):
        job_of(snapshot, job)
    if node and not any(chosen(cluster, "", node, 0.0)):
        check_known(node, cluster)
    rows = listed(cluster, job, node, since_wall_s, last)
    if not request.flag(query, "follow"):
        return {"etcd": views.etcd(snapshot, h.service.identity, now()), "events": rows}
    h.begin_stream()
    for row in rows:
        h.stream(row)
    while h.still_there():
        before = cluster.events
        cluster = published.wait(_others_than(before), FOLLOW_S).cluster
        for key, event in chosen(cluster, job, node, since_wall_s):
            if key not in before:
                h.stream(timeline.answer(event))
    h.end_stream()
    return None


def _others_than(before: Mapping[str, bytes]) -> Callable[[Snapshot], bool]:
    return lambda snapshot: snapshot.cluster.events.keys() != before.keys()
