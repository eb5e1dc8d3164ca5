"""The API's answers about one node, and the checks of all of them. See docs/api.md."""

from __future__ import annotations

import time

import msgspec

from elasticd.api import request
from elasticd.api.actions import check_known
from elasticd.api.request import Query, Request
from elasticd.api.views import views
from elasticd.base import answers, command_answers
from elasticd.base.answers import Diagnosis, Json
from elasticd.cluster import drain_effects
from elasticd.cluster.published_state import Snapshot

from .job_routes import asking


def get_doctor(h: Request, query: Query) -> Diagnosis:
    return h.service.doctor.whole(h.service.published.now, asking(h))


def get_doctor_local(h: Request, query: Query) -> Json:
    return h.service.doctor.answer(query.get("connect", ""), h.service.published.now)


def get_node(h: Request, query: Query, node: str) -> command_answers.NodeDetail:
    snapshot = _with_node(h, node)
    if (wait_s := request.seconds(query, "wait_empty_s")) > 0:
        snapshot = h.service.published.wait(lambda s: s.cluster.is_empty(node), min(wait_s, answers.LONGEST_WAIT_S))
    there = {"jobs": snapshot.cluster.jobs_on(node), "empty": snapshot.cluster.is_empty(node)}
    return command_answers.NodeDetail(**msgspec.structs.asdict(row(snapshot, h.service.identity.node, node)) | there)


def row(snapshot: Snapshot, me: str, node: str) -> answers.Node:
    """As `views.nodes` shows it; of a node that has neither a daemon nor an agent its name and the state 'gone'."""
    gone = answers.Node(node=node, state="gone")
    return next((row for row in views.nodes(snapshot, me, time.time()) if row.node == node), gone)


def changed(h: Request, node: str) -> Json:
    """The answer to a request that has changed the node: its state since."""
    seen = row(h.service.published.now, h.service.identity.node, node)
    return {"node": seen.node, "state": seen.state, "reason": seen.reason}


def get_drain(h: Request, query: Query, node: str) -> command_answers.DrainPreview:
    return command_answers.DrainPreview(node=node, jobs=drain_effects.effects(_with_node(h, node).cluster, node))


def get_gc(h: Request, query: Query) -> command_answers.Cleanup:
    """What would be removed here. Names of other users' jobs are in it: only for users that may remove these."""
    return _clean(h, dry_run=True)


def post_gc(h: Request, query: Query) -> command_answers.Cleanup:
    return _clean(h, dry_run=False)


def _clean(h: Request, *, dry_run: bool) -> command_answers.Cleanup:
    h.service.authority.check_node(h.peer(), h.service.identity.node, "clean up")
    return h.service.cleaner.clean(dry_run=dry_run)


def _with_node(h: Request, node: str) -> Snapshot:
    """The newest snapshot, if it knows the node. Raises Refused (404, 503)."""
    snapshot = h.service.published.now
    check_known(node, snapshot.cluster)
    return snapshot
