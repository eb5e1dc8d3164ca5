"""The answer of `GET /v1/events`: the cluster's time line, as it is or followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from elastic.contract.records.node_records import EventRecord
from elasticd.api.actions import checked, known_nodes, no_job, no_node
from elasticd.api.request import Request
from elasticd.base import answers
from elasticd.cluster.cluster import Cluster
from elasticd.cluster.published_state import PublishedState, Snapshot
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


def check_names(snapshot: Snapshot, job: str, node: str) -> None:
    """Raises Refused: 400 for what can be no name, 404 for a job or node that is not there and that no event names; ''
    is any."""
    cluster = snapshot.cluster
    for field, name in (("job", job), ("node", node)):
        checked(field, name or "any")
    if job and job not in cluster.jobs and not any(chosen(cluster, job, "", 0.0)):
        raise no_job(job, snapshot)
    if node and node not in (names := known_nodes(cluster)) and not any(chosen(cluster, "", node, 0.0)):
        raise no_node(node, names, cluster)


def listed(cluster: Cluster, job: str, node: str, since_wall_s: float, last: int) -> list[answers.Event]:
    """The newest `last` of those chosen; 0: all of them."""
    return [timeline.answer(event) for _, event in chosen(cluster, job, node, since_wall_s)][-last:]


def follow(h: Request, published: PublishedState, job: str, node: str, since_wall_s: float, last: int) -> None:
    """Answer with the chosen events, and with each new one, until the client has gone."""
    cluster = published.now.cluster
    h.begin_stream()
    for row in listed(cluster, job, node, since_wall_s, last):
        h.stream(row)
    while h.still_there():
        before = cluster.events
        cluster = published.wait(_others_than(before), FOLLOW_S).cluster
        for key, event in chosen(cluster, job, node, since_wall_s):
            if key not in before:
                h.stream(timeline.answer(event))
    h.end_stream()


def _others_than(before: Mapping[str, bytes]) -> Callable[[Snapshot], bool]:
    return lambda snapshot: snapshot.cluster.events.keys() != before.keys()
