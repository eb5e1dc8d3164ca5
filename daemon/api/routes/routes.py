"""The answers of the API: one function per path. See docs/api.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from elasticd.access.accounts import named
from elasticd.api import request
from elasticd.api.actions import checked, job_of
from elasticd.api.request import Drain, Forget, Query, Reason, Request, Scale, Submit, read_body
from elasticd.api.views import views
from elasticd.api.views.instant import now
from elasticd.base import answers, command_answers, masking
from elasticd.base.answers import SCHEMA, Json
from elasticd.base.errors import Refused
from elasticd.cluster.published_state import Snapshot
from elasticd.node.asks import ask_each

from . import event_routes, fault_routes, job_routes, log_routes, node_routes


def get_status(h: Request, query: Query) -> answers.Status:
    return _status(h, request.flag(query, "all"))


def get_jobs(h: Request, query: Query) -> Json:
    full = _status(h, every=True)
    return {"cluster": full.cluster, "etcd": full.etcd, "jobs": full.jobs}


def get_nodes(h: Request, query: Query) -> Json:
    full = views.status(h.service.published.now, h.service.identity, now())
    return {"cluster": full.cluster, "etcd": full.etcd, "nodes": full.nodes}


def get_job(h: Request, query: Query, job: str) -> answers.JobDetail:
    snapshot = h.service.published.now
    if (wait_s := request.seconds(query, "wait_over_s")) > 0:
        snapshot = h.service.published.wait(
            lambda s: job not in s.cluster.jobs or s.cluster.jobs[job].ended, min(wait_s, answers.LONGEST_WAIT_S)
        )
    current = job_of(snapshot, job)
    if secrets := request.flag(query, "secrets"):
        h.service.authority.check_job(h.peer(), job, current.spec, "read the secrets of")
    own = h.service.authority.may_change(h.peer(), current.spec)
    detail = views.job_detail(snapshot, current, now(), own=own, secrets=secrets)
    if not own:
        detail = masking.job(detail)
    detail.etcd = views.etcd(snapshot, h.service.identity, now())
    return detail


def get_history(h: Request, query: Query, job: str) -> answers.History:
    snapshot = h.service.published.now
    current = snapshot.cluster.jobs.get(job)
    history = job_routes.history(h.service.logs(job), current.spec if current else None)
    if history is None:
        raise Refused(404, job_routes.nowhere(job, job_of(snapshot, job).generation, h.service.identity.node))
    history.job, history.node = job, h.service.identity.node
    return history


def get_incidents(h: Request, query: Query) -> Json:
    snapshot, job = h.service.published.now, query.get("job", "")
    if job:
        job_of(snapshot, job)
    rows = views.incidents(snapshot, job, now())[-request.count(query, "last", 0) :]
    strange = _others_jobs(h, snapshot)
    shown = [masking.incident(row) if row.job in strange else row for row in rows]
    return {"etcd": views.etcd(snapshot, h.service.identity, now()), "incidents": shown}


def get_config(h: Request, query: Query) -> command_answers.Config | Json:
    own = h.service.config()
    if not request.flag(query, "nodes"):
        return own
    me = h.service.identity.node
    others = sorted(h.service.published.now.cluster.nodes.keys() - {me})
    return {"nodes": {me: own, **ask_each(h.service.asker, others, "/v1/config", {}, job_routes.asking(h))}}


def post_job(h: Request, query: Query) -> Json:
    submit = read_body(h, Submit) if "spec" in h.body() else Submit(h.body())
    if field := masking.mask_in(submit.spec):
        raise Refused(400, f"{field} holds {masking.MASK}, which hides a secret in a status: give the value itself")
    owner = h.service.authority.submitter(h.peer(), submit.user, named(submit.user))
    name = h.service.actions.submit(submit.spec, h.peer(), owner, submit.replace)
    plan = h.service.published.now.plan
    return {"job": name, "note": str(plan.waiting[name]) if name in plan.never else ""}


def post_stop(h: Request, query: Query, job: str) -> Json:
    h.service.actions.stop(job, read_body(h, Reason).reason or f"stopped by {h.peer().user}", h.peer())
    return _phase(h, job)


def post_restart(h: Request, query: Query, job: str) -> Json:
    h.service.actions.restart(job, h.peer())
    return _phase(h, job)


def post_scale(h: Request, query: Query, job: str) -> Json:
    h.service.actions.scale(job, read_body(h, Scale).nodes, h.peer())
    return _phase(h, job)


def post_checkpoint(h: Request, query: Query, job: str) -> Json:
    h.service.actions.checkpoint(job, h.peer())
    return _phase(h, job)


def delete_job(h: Request, query: Query, job: str) -> Json:
    h.service.actions.forget(job, h.peer())
    return {"job": job}


def post_forget(h: Request, query: Query) -> Json:
    """Many jobs in one request, those left out that are not there, not over or not the user's."""
    return {"forgotten": h.service.actions.forget_each(read_body(h, Forget).jobs, h.peer())}


def post_cordon(h: Request, query: Query, node: str) -> Json:
    h.service.authority.check_node(h.peer(), node, "cordon")
    h.service.actions.cordon(node, read_body(h, Reason).reason or f"cordoned by {h.peer().user}")
    return node_routes.changed(h, node)


def post_uncordon(h: Request, query: Query, node: str) -> Json:
    h.service.authority.check_node(h.peer(), node, "uncordon")
    h.service.actions.uncordon(node)
    return node_routes.changed(h, node)


def post_drain(h: Request, query: Query, node: str) -> Json:
    h.service.authority.check_node(h.peer(), node, "drain")
    drain = read_body(h, Drain)
    h.service.actions.drain(node, drain.reason or f"drained by {h.peer().user}", drain.deadline_s)
    return node_routes.changed(h, node)


def delete_node(h: Request, query: Query, node: str) -> Json:
    h.service.authority.check_node(h.peer(), node, "forget")
    h.service.actions.forget_node(node)
    return {"node": node}


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


def _phase(h: Request, job: str) -> Json:
    current = h.service.published.now.cluster.jobs.get(job)
    return {"job": job, "phase": str(current.state.phase) if current else None}


_JOB, _NODE = "(?P<job>[^/]+)", "(?P<node>[^/]+)"
Answer = Callable[..., answers.Answer | Json | None]
"""A request's answer; None: it was a stream."""
_ROUTES: tuple[tuple[str, str, Answer, str], ...] = (
    ("GET", "/v1/status", get_status, ""),
    ("GET", "/v1/jobs", get_jobs, ""),
    ("GET", f"/v1/jobs/{_JOB}", get_job, ""),
    ("GET", f"/v1/jobs/{_JOB}/history", get_history, ""),
    ("GET", f"/v1/jobs/{_JOB}/logs", log_routes.get_logs, ""),
    ("GET", f"/v1/jobs/{_JOB}/stacks", job_routes.get_stacks, ""),
    ("GET", f"/v1/jobs/{_JOB}/gradients", job_routes.get_gradients, ""),
    ("POST", f"/v1/jobs/{_JOB}/debug", job_routes.post_debug, "job.sample_requested"),
    ("POST", f"/v1/jobs/{_JOB}/fault", fault_routes.post_fault, "job.fault_requested"),
    ("GET", "/v1/doctor", node_routes.get_doctor, ""),
    ("GET", "/v1/doctor/local", node_routes.get_doctor_local, ""),
    ("GET", "/v1/nodes", get_nodes, ""),
    ("GET", f"/v1/nodes/{_NODE}", node_routes.get_node, ""),
    ("GET", f"/v1/nodes/{_NODE}/drain", node_routes.get_drain, ""),
    ("GET", "/v1/incidents", get_incidents, ""),
    ("GET", "/v1/events", event_routes.get_events, ""),
    ("GET", "/v1/config", get_config, ""),
    ("GET", "/v1/gc", node_routes.get_gc, ""),
    ("POST", "/v1/gc", node_routes.post_gc, "node.cleaned"),
    ("POST", "/v1/jobs", post_job, "job.submitted"),
    ("POST", f"/v1/jobs/{_JOB}/stop", post_stop, "job.stop_requested"),
    ("POST", f"/v1/jobs/{_JOB}/restart", post_restart, "job.restarted"),
    ("POST", f"/v1/jobs/{_JOB}/scale", post_scale, "job.scaled"),
    ("POST", f"/v1/jobs/{_JOB}/checkpoint", post_checkpoint, "job.checkpoint_requested"),
    ("DELETE", f"/v1/jobs/{_JOB}", delete_job, "job.forgotten"),
    ("POST", "/v1/forget", post_forget, "job.forgotten"),
    ("POST", f"/v1/nodes/{_NODE}/cordon", post_cordon, "node.cordoned"),
    ("POST", f"/v1/nodes/{_NODE}/uncordon", post_uncordon, "node.uncordoned"),
    ("POST", f"/v1/nodes/{_NODE}/drain", post_drain, "node.drain_requested"),
    ("DELETE", f"/v1/nodes/{_NODE}", delete_node, "node.forgotten"),
)
"""Method, path, function, and what a change is called in the audit trail."""
ROUTES = tuple((verb, re.compile(path), answer) for verb, path, answer, _ in _ROUTES)
KINDS: Mapping[Answer, str] = {answer: kind for _, _, answer, kind in _ROUTES if kind}


def respond(h: Request, method: str, path: str, query: Query) -> None:
    """Answer a request. Raises Refused."""
    answer, names = find(method, path)
    if method != "GET":
        _change(h, query, answer, names)
    elif (content := answer(h, query, **names)) is not None:
        _send(h, 200, content)


def _send(h: Request, status: int, content: answers.Answer | Json) -> None:
    h.send_json(status, {"schema": SCHEMA} | content if isinstance(content, dict) else content)


def _change(h: Request, query: Query, answer: Answer, names: Mapping[str, str]) -> None:
    """Carry out a request that changes something, and write it into the audit trail, also if it is refused."""
    audit, kind, peer = h.service.audit, KINDS[answer], h.peer()
    about = {"node": h.service.identity.node} if answer is node_routes.post_gc else names
    target, text = dict(about), ""
    try:
        target, text = _summary(h.body(), about)
        content = answer(h, query, **names)
    except Refused as refused:
        audit.failed(peer, kind, refused.status, str(refused), **target)
        raise
    try:
        _send(h, 201 if answer is post_job else 200, content or {})
    finally:  # also if its client has gone
        audit.done(peer, kind, text=text, **target)


_ARGUMENTS = "reason", "nodes", "deadline_s", "replace", "as", "do", "rank", "step", "place", "for_s"


def _summary(body: Mapping[str, Any], names: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(job or node of a request, its arguments as text, without a job's description)."""
    target = dict(names)
    spec = body.get("spec", body)
    if not target and isinstance(spec, dict) and isinstance(name := spec.get("name"), str):
        target["job"] = name[:63]
    fields = _ARGUMENTS if spec is not body or names else ()
    if not target and isinstance(jobs := body.get("jobs"), list):
        return {}, f"{len(jobs)} jobs: {', '.join(map(str, jobs[:3]))}, …"
    given = {name: body[name] for name in fields if body.get(name) not in (None, "", False)}
    given |= {name: body[name] for name in fields if name == "rank" and name in body}  # 0, too
    return target, ", ".join(f"{key} = {value!r}" for key, value in given.items())


def template(method: str, path: str) -> tuple[str, str]:
    """Method and pattern of a request for metrics, as ('GET', '/v1/jobs/{job}'); ('other', 'other') for any other."""
    for verb, pattern, _ in ROUTES:
        if verb == method and pattern.fullmatch(path):
            return verb, re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", pattern.pattern)
    return "other", "other"


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
