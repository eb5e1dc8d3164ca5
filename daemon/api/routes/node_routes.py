"""The API's answers about one node. See docs/api.md."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from elasticd.api.actions import known_nodes, no_node
from elasticd.api.http import query_values
from elasticd.base import answers
from elasticd.base.answers import SCHEMA
from elasticd.cluster import drain_effects
from elasticd.cluster.published_state import Snapshot
from elasticd.views import views

if TYPE_CHECKING:
    from elasticd.api.request import Request

Query = Mapping[str, str]

LONGEST_WAIT_S = 60.0


def get_node(h: Request, query: Query, node: str) -> None:
    snapshot = _with_node(h, node)
    if (wait_s := query_values.seconds(query, "wait_empty_s")) > 0:
        snapshot = h.service.published.wait(lambda s: s.cluster.is_empty(node), min(wait_s, LONGEST_WAIT_S))
    found = row(snapshot, h.service.identity.node, node)
    there = {"jobs": snapshot.cluster.jobs_on(node), "empty": snapshot.cluster.is_empty(node)}
    h.send_json(200, {"schema": SCHEMA} | msgspec.structs.asdict(found) | there)


def row(snapshot: Snapshot, me: str, node: str) -> answers.Node:
    """As `views.nodes` shows it; of a node that has neither a daemon nor an agent its name and the state 'gone'."""
    gone = answers.Node(node=node, state="gone")
    return next((row for row in views.nodes(snapshot, me, time.time()) if row.node == node), gone)


def changed(h: Request, node: str) -> None:
    """Answer a request that has changed the node: with its state since."""
    seen = row(h.service.published.now, h.service.identity.node, node)
    h.send_json(200, {"schema": SCHEMA, "node": seen.node, "state": seen.state, "reason": seen.reason})


def get_drain(h: Request, query: Query, node: str) -> None:
    found = drain_effects.effects(_with_node(h, node).cluster, node)
    rows = [msgspec.to_builtins(effect) | {"text": effect.text} for effect in found]
    h.send_json(200, {"schema": SCHEMA, "node": node, "jobs": rows})


def get_gc(h: Request, query: Query) -> None:
    """What would be removed here. Names of other users' jobs are in it: only for users that may remove these."""
    h.service.authority.check_node(h.peer(), h.service.identity.node, "clean up")
    h.send_json(200, {"schema": SCHEMA} | h.service.cleaner.clean(dry_run=True))


def post_gc(h: Request, query: Query) -> None:
    h.service.authority.check_node(h.peer(), h.service.identity.node, "clean up")
    h.send_json(200, {"schema": SCHEMA} | h.service.cleaner.clean(dry_run=False))


def _with_node(h: Request, node: str) -> Snapshot:
    """The newest snapshot, if it knows the node. Raises Refused (404, 503)."""
    snapshot = h.service.published.now
    cluster = snapshot.cluster
    if node not in (known := known_nodes(cluster)):
        raise no_node(node, known, cluster)
    return snapshot
