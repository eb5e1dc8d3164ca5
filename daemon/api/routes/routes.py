"""The answers of the API: one function per path. See docs/api.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from elastic.contract.keys import check_name
from elasticd.access.accounts import named
from elasticd.api.actions import no_job
from elasticd.api.http import query_values
from elasticd.api.request import LONGEST_WAIT_S, MAX_DEADLINE_S, MAX_REASON_CHARS, Query, Request
from elasticd.base import answers, masking
from elasticd.base.answers import SCHEMA
from elasticd.base.errors import Refused
from elasticd.cluster.published_state import Snapshot
from elasticd.node.asks import ask_each
from elasticd.views import views
from elasticd.views.instant import now

from . import course, debug_routes, doctor_routes, event_routes, job_routes, log_routes, node_routes

MAX_FORGOTTEN = 512
"""Jobs in one request."""


def get_status(h: Request, query: Query) -> None:
    h.send_json(200, _status(h, query_values.flag(query, "all")))


def get_jobs(h: Request, query: Query) -> None:
    full = _status(h, every=True)
    h.send_json(200, {"schema": SCHEMA, "cluster": full.cluster, "etcd": full.etcd, "jobs": full.jobs})


def get_nodes(h: Request, query: Query) -> None:
    full = views.status(h.service.published.now, h.service.identity, now())
    h.send_json(200, {"schema": SCHEMA, "cluster": full.cluster, "etcd": full.etcd, "nodes": full.nodes})


def get_job(h: Request, query: Query, job: str) -> None:
    snapshot = h.service.published.now
    if (wait_s := query_values.seconds(query, "wait_over_s")) > 0:
        snapshot = h.service.published.wait(
            lambda s: job not in s.cluster.jobs or s.cluster.jobs[job].over, min(wait_s, LONGEST_WAIT_S)
        )
    if job not in snapshot.cluster.jobs:
        raise no_job(job, snapshot)
    known = snapshot.cluster.jobs[job]
    if secrets := query_values.flag(query, "secrets"):
        h.service.authority.check_job(h.peer(), job, known.spec, "read the secrets of")
    detail = views.job_detail(snapshot, known, now(), secrets=secrets)
    if not h.service.authority.may_change(h.peer(), known.spec):
        detail = masking.job(detail)
    detail.etcd = views.etcd(snapshot, h.service.identity, now())
    h.send_json(200, detail)


def get_history(h: Request, query: Query, job: str) -> None:
    published = h.service.published.now
    known = published.cluster.jobs.get(job)
    found = course.read(h.service.logs(job), known.spec if known else None)
    if found is None:
        if known is None:
            raise no_job(job, published)
        raise Refused(404, course.nowhere(job, known.generation, h.service.identity.node))
    found.job, found.node = job, h.service.identity.node
    h.send_json(200, found)


def get_incidents(h: Request, query: Query) -> None:
    snapshot, job = h.service.published.now, query.get("job", "")
    if job and job not in snapshot.cluster.jobs:
        raise no_job(job, snapshot)
    found = views.incidents(snapshot, job, now())
    if (last := query_values.count(query, "last", 0)) > 0:
        found = found[-last:]
    strange = _others_jobs(h, snapshot)
    shown = [masking.incident(row) if row.job in strange else row for row in found]
    etcd = views.etcd(snapshot, h.service.identity, now())
    h.send_json(200, {"schema": SCHEMA, "etcd": etcd, "incidents": shown})


def get_events(h: Request, query: Query) -> None:
    published, job, node = h.service.published, query.get("job", ""), query.get("node", "")
    since_wall_s, last = query_values.seconds(query, "since_wall_s"), query_values.count(query, "last", 0)
    event_routes.check_names(published.now, job, node)
    if query.get("follow", "0") in ("1", "true", ""):
        event_routes.follow(h, published, job, node, since_wall_s, last)
    else:
        found = event_routes.listed(published.now.cluster, job, node, since_wall_s, last)
        etcd = views.etcd(published.now, h.service.identity, now())
        h.send_json(200, {"schema": SCHEMA, "etcd": etcd, "events": found})


def get_config(h: Request, query: Query) -> None:
    mine = h.service.config()
    if not query_values.flag(query, "nodes"):
        h.send_json(200, mine)
        return
    me = h.service.identity.node
    others = sorted(h.service.published.now.cluster.nodes.keys() - {me})
    answers = ask_each(h.service.asker, others, "/v1/config", {}, job_routes.asking(h))
    h.send_json(200, {"schema": SCHEMA, "nodes": {me: mine, **answers}})


def post_job(h: Request, query: Query) -> None:
    body = h.body()
    spec, replace, wanted = body, False, ""
    if "spec" in body:
        spec, replace, wanted = body["spec"], body.get("replace", False), body.get("as", "")
        if unknown := sorted(body.keys() - {"spec", "replace", "as"}):
            raise Refused(400, f"{unknown[0]}: no such field beside spec, replace and as")
    if not isinstance(spec, dict):
        raise Refused(400, "spec must be a JSON object")
    if not isinstance(replace, bool):
        raise Refused(400, f"replace = {replace!r}: true or false")
    if not isinstance(wanted, str):
        raise Refused(400, f"as = {wanted!r}: the name of a user")
    if field := masking.mask_in(spec):
        raise Refused(400, f"{field} holds {masking.MASK}, which hides a secret in a status: give the value itself")
    owner = h.service.authority.submitter(h.peer(), wanted, named(wanted))
    name = h.service.actions.submit(spec, h.peer(), owner, replace)
    plan = h.service.published.now.plan
    h.send_json(201, {"schema": SCHEMA, "job": name, "note": plan.waiting[name] if name in plan.never else ""})


def post_stop(h: Request, query: Query, job: str) -> None:
    reason = _text(h.body(), "reason", f"stopped by {h.peer().user}")
    h.service.actions.stop(job, reason, h.peer())
    _done(h, job)


def post_restart(h: Request, query: Query, job: str) -> None:
    h.service.actions.restart(job, h.peer())
    _done(h, job)


def post_scale(h: Request, query: Query, job: str) -> None:
    h.service.actions.scale(job, _text(h.body(), "nodes"), h.peer())
    _done(h, job)


def post_checkpoint(h: Request, query: Query, job: str) -> None:
    h.service.actions.checkpoint(job, h.peer())
    _done(h, job)


def delete_job(h: Request, query: Query, job: str) -> None:
    h.service.actions.forget(job, h.peer())
    h.send_json(200, {"schema": SCHEMA, "job": job})


def post_forget(h: Request, query: Query) -> None:
    """Many jobs in one request, those left out that are not there, not over or not the user's."""
    jobs = h.body().get("jobs")
    if not isinstance(jobs, list) or len(jobs) > MAX_FORGOTTEN or not all(isinstance(job, str) for job in jobs):
        raise Refused(400, f"jobs: a list of at most {MAX_FORGOTTEN} names")
    h.send_json(200, {"schema": SCHEMA, "forgotten": h.service.actions.forget_each(jobs, h.peer())})


def post_cordon(h: Request, query: Query, node: str) -> None:
    h.service.authority.check_node(h.peer(), node, "cordon")
    h.service.actions.cordon(node, _text(h.body(), "reason", f"cordoned by {h.peer().user}"))
    node_routes.changed(h, node)


def post_uncordon(h: Request, query: Query, node: str) -> None:
    h.service.authority.check_node(h.peer(), node, "uncordon")
    h.service.actions.uncordon(node)
    node_routes.changed(h, node)


def post_drain(h: Request, query: Query, node: str) -> None:
    h.service.authority.check_node(h.peer(), node, "drain")
    body = h.body()
    deadline_s = body.get("deadline_s", 0)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 <= deadline_s <= MAX_DEADLINE_S:
        raise Refused(400, f"deadline_s = {deadline_s!r}: seconds from 0 to {MAX_DEADLINE_S:g}; 0: no deadline")
    h.service.actions.drain(node, _text(body, "reason", f"drained by {h.peer().user}"), float(deadline_s))
    node_routes.changed(h, node)


def delete_node(h: Request, query: Query, node: str) -> None:
    h.service.authority.check_node(h.peer(), node, "forget")
    h.service.actions.forget_node(node)
    h.send_json(200, {"schema": SCHEMA, "node": node})


def _status(h: Request, every: bool) -> answers.Status:
    """Without log lines of jobs whose logs this user may not read."""
    snapshot = h.service.published.now
    full = views.status(snapshot, h.service.identity, now(), every)
    if strange := _others_jobs(h, snapshot):
        full.jobs = [masking.job(row) if row.job in strange else row for row in full.jobs]
    return full


def _others_jobs(h: Request, snapshot: Snapshot) -> set[str]:
    """Names of the jobs whose logs the user at the other end may not read."""
    if not snapshot.cluster.jobs:
        return set()
    authority, peer = h.service.authority, h.peer()
    return {job.name for job in snapshot.cluster.jobs.values() if not authority.may_change(peer, job.spec)}


KINDS: Mapping[Callable[..., None], str] = {
    post_job: "job.submitted",
    post_stop: "job.stop_requested",
    post_restart: "job.restarted",
    post_scale: "job.scaled",
    post_checkpoint: "job.checkpoint_requested",
    debug_routes.post_debug: "job.sample_requested",
    delete_job: "job.forgotten",
    post_forget: "job.forgotten",
    post_cordon: "node.cordoned",
    post_uncordon: "node.uncordoned",
    post_drain: "node.drain_requested",
    delete_node: "node.forgotten",
    node_routes.post_gc: "node.cleaned",
}
"""What a change is called in the audit trail."""


def change(h: Request, answer: Callable[..., None], query: Query, names: Mapping[str, str]) -> None:
    """Carry out a request that changes something, and write it into the audit trail, also if it is refused."""
    audit, kind, peer = h.service.audit, KINDS[answer], h.peer()
    about = {"node": h.service.identity.node} if answer is node_routes.post_gc else names
    target, said = dict(about), ""
    try:
        target, said = _summary(h.body(), about)
        answer(h, query, **names)
    except Refused as refused:
        audit.failed(peer, kind, refused.status, str(refused), **target)
        raise
    except OSError:  # the change was made, only its client has gone
        audit.done(peer, kind, text=said, **target)
        raise
    audit.done(peer, kind, text=said, **target)


def _summary(body: Mapping[str, Any], names: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(job or node of a request, its arguments as text, without a job's description)."""
    target = dict(names)
    spec = body.get("spec", body)
    if not target and isinstance(spec, dict) and isinstance(name := spec.get("name"), str):
        target["job"] = name[:63]
    fields = ("reason", "nodes", "deadline_s", "replace", "as") if spec is not body or names else ()
    if not target and isinstance(jobs := body.get("jobs"), list):
        return {}, f"{len(jobs)} jobs: {', '.join(map(str, jobs[:3]))}, …"
    given = {name: body[name] for name in fields if body.get(name) not in (None, "", False)}
    return target, ", ".join(f"{key} = {value!r}" for key, value in given.items())


def _done(h: Request, job: str) -> None:
    known = h.service.published.now.cluster.jobs.get(job)
    h.send_json(200, {"schema": SCHEMA, "job": job, "phase": str(known.state.phase) if known else None})


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"{name} = {value!r}: a text is needed")
    if len(value) > MAX_REASON_CHARS:
        raise Refused(400, f"{name} has {len(value)} characters: at most {MAX_REASON_CHARS}")
    return value


_JOB, _NODE = "(?P<job>[^/]+)", "(?P<node>[^/]+)"
Answer = Callable[..., None]
ROUTES: tuple[tuple[str, re.Pattern[str], Answer], ...] = tuple(
    (verb, re.compile(pattern), answer)
    for verb, pattern, answer in (
        ("GET", "/v1/status", get_status),
        ("GET", "/v1/jobs", get_jobs),
        ("GET", f"/v1/jobs/{_JOB}", get_job),
        ("GET", f"/v1/jobs/{_JOB}/history", get_history),
        ("GET", f"/v1/jobs/{_JOB}/logs", log_routes.get_logs),
        ("GET", f"/v1/jobs/{_JOB}/stacks", job_routes.get_stacks),
        ("GET", f"/v1/jobs/{_JOB}/gradients", debug_routes.get_gradients),
        ("POST", f"/v1/jobs/{_JOB}/debug", debug_routes.post_debug),
        ("GET", "/v1/doctor", doctor_routes.get_doctor),
        ("GET", "/v1/doctor/local", doctor_routes.get_doctor_local),
        ("GET", "/v1/nodes", get_nodes),
        ("GET", f"/v1/nodes/{_NODE}", node_routes.get_node),
        ("GET", f"/v1/nodes/{_NODE}/drain", node_routes.get_drain),
        ("GET", "/v1/incidents", get_incidents),
        ("GET", "/v1/events", get_events),
        ("GET", "/v1/config", get_config),
        ("GET", "/v1/gc", node_routes.get_gc),
        ("POST", "/v1/gc", node_routes.post_gc),
        ("POST", "/v1/jobs", post_job),
        ("POST", f"/v1/jobs/{_JOB}/stop", post_stop),
        ("POST", f"/v1/jobs/{_JOB}/restart", post_restart),
        ("POST", f"/v1/jobs/{_JOB}/scale", post_scale),
        ("POST", f"/v1/jobs/{_JOB}/checkpoint", post_checkpoint),
        ("DELETE", f"/v1/jobs/{_JOB}", delete_job),
        ("POST", "/v1/forget", post_forget),
        ("POST", f"/v1/nodes/{_NODE}/cordon", post_cordon),
        ("POST", f"/v1/nodes/{_NODE}/uncordon", post_uncordon),
        ("POST", f"/v1/nodes/{_NODE}/drain", post_drain),
        ("DELETE", f"/v1/nodes/{_NODE}", delete_node),
    )
)


def template(method: str, path: str) -> tuple[str, str]:
    """Method and pattern of a request for metrics, as ('GET', '/v1/jobs/{job}'); ('other', 'other') for any other."""
    for verb, pattern, _ in ROUTES:
        if verb == method and pattern.fullmatch(path):
            return verb, re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", pattern.pattern)
    return "other", "other"


def checked(field: str, name: str) -> str:
    """`name`, or Refused (400)."""
    try:
        return check_name(field, name)
    except ValueError as error:
        raise Refused(400, str(error)) from None


def find(method: str, path: str) -> tuple[Answer, dict[str, str]]:
    """The function for a request and the names in its path, unquoted. Raises Refused (400, 404, 405).

    The names are checked here, for every path: some become parts of file names and of keys in etcd.
    """
    others = []
    for verb, pattern, answer in ROUTES:
        if match := pattern.fullmatch(path):
            if verb == method:
                return answer, {field: checked(field, unquote(raw)) for field, raw in match.groupdict().items()}
            others.append(verb)
    if others:
        raise Refused(405, f"{path} takes {', '.join(others)}, not {method}")
    raise Refused(404, f"no {path}; see docs/api.md")
