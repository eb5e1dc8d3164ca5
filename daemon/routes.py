"""The answers of the API: one function per path. See docs/api.md."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from elastic.core.keys import check_name
from elastic.core.records import Phase

from . import views
from .actions import Actions, no_job
from .errors import Refused
from .folders import Folder
from .log import Log
from .logs import PAST_BYTES, Line, Tail
from .published_state import PublishedState, Snapshot
from .views import SCHEMA, Identity, Json, Now

LONGEST_WAIT_S = 60.0
FOLLOW_S = 0.2
"""Polling interval of a followed log."""
PROGRESS_S = 0.5
"""Minimum interval between progress messages to a follower."""
WAITS_S = 2.0
"""How long a job must have waited for something before its followers are told."""

MAX_DEADLINE_S = 1e9
"""Of a drain. Timers accept no unbounded numbers."""
MAX_REASON_CHARS = 1_000
"""A reason is copied into records, orders and every status of the node."""
COUNT = re.compile("[0-9]{1,9}")

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Service:
    """The sources of the answers."""

    board: PublishedState
    actions: Actions
    identity: Identity
    logs: Callable[[str], Folder]
    config: Callable[[], Json]
    log: Log


class Request(Protocol):
    """The request at hand, and the way to answer it."""

    @property
    def service(self) -> Service: ...
    def body(self) -> dict[str, Any]: ...
    def peer(self) -> str: ...
    def send_json(self, status: int, content: Json) -> None: ...
    def begin_stream(self) -> None: ...
    def stream(self, content: Json) -> None: ...
    def end_stream(self) -> None: ...
    def still_there(self) -> bool: ...


def now() -> Now:
    return Now(time.monotonic(), time.time())


def get_status(h: Request, query: Query) -> None:
    h.send_json(200, views.status(h.service.board.now, h.service.identity, now()))


def get_jobs(h: Request, query: Query) -> None:
    full = views.status(h.service.board.now, h.service.identity, now())
    h.send_json(200, {key: full[key] for key in ("schema", "cluster", "etcd", "jobs")})


def get_nodes(h: Request, query: Query) -> None:
    full = views.status(h.service.board.now, h.service.identity, now())
    h.send_json(200, {key: full[key] for key in ("schema", "cluster", "etcd", "nodes")})


def get_job(h: Request, query: Query, job: str) -> None:
    snapshot = h.service.board.now
    if (wait_s := _seconds(query, "wait_over_s")) > 0:
        snapshot = h.service.board.wait(
            lambda s: job not in s.cluster.jobs or s.cluster.jobs[job].over, min(wait_s, LONGEST_WAIT_S)
        )
    if job not in snapshot.cluster.jobs:
        raise Refused(404, no_job(job, snapshot))
    detail = views.job_detail(snapshot, snapshot.cluster.jobs[job], now())
    h.send_json(200, detail | {"etcd": views.etcd(snapshot, h.service.identity, now())})


def get_incidents(h: Request, query: Query) -> None:
    snapshot, job = h.service.board.now, query.get("job", "")
    if job and job not in snapshot.cluster.jobs:
        raise Refused(404, no_job(job, snapshot))
    found = views.incidents(snapshot, job, now())
    if (last := _count(query, "last", 0)) > 0:
        found = found[-last:]
    h.send_json(200, {"schema": SCHEMA, "incidents": found})


def get_config(h: Request, query: Query) -> None:
    h.send_json(200, h.service.config())


def get_logs(h: Request, query: Query, job: str) -> None:
    board = h.service.board
    rank = _count(query, "rank", 0) if "rank" in query else None
    tail = Tail(h.service.logs(job), _slot_of(h, job, rank) if rank is not None else None)
    last = tail.last(_count(query, "tail", 100))
    if not last and job not in board.now.cluster.jobs:
        raise Refused(404, no_job(job, board.now))
    h.begin_stream()
    if tail.cut:
        h.stream({"note": f"of the lines asked for, only the last {len(last)} are shown: as many as were found in the "
                          f"newest {PAST_BYTES // 2**20} MiB", "cut": True})  # fmt: skip
    for line in last:
        h.stream(_line(h, job, line))
    follow = query.get("follow", "0") in ("1", "true", "")
    told, waits = _told(board.now, job), Waits(job)
    progress = Progress(job) if query.get("progress", "0") in ("1", "true", "") else None
    while follow and h.still_there():
        if note := waits.look(board.now, time.monotonic()):
            h.stream({"note": note})
        before, told = told, _told(board.now, job)
        for note in news(before, told):
            h.stream({"note": note})
        if progress and (row := progress.look(board.now, time.monotonic())):
            h.stream({"progress": row})
        for line in tail.more():
            h.stream(_line(h, job, line))
        follow = not _ended(board.wait(lambda s: _ended(s, job), FOLLOW_S), job)
    for line in (*tail.more(), *tail.rest()):
        h.stream(_line(h, job, line))
    known = board.now.cluster.jobs.get(job)
    phase = str(known.state.phase) if known else None
    h.stream({"end": True, "phase": phase, "elsewhere": _elsewhere(h, job) if rank is None else {}})
    h.end_stream()


class Waits:
    """Reports what a job that makes no step yet waits for, once it has waited for that for a while."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._since: tuple[str, float] = ("", 0.0)
        self._said = ""

    def look(self, snapshot: Snapshot, now_s: float) -> str:
        """The message to send now; '' if there is none."""
        known = snapshot.cluster.jobs.get(self._job)
        stands = known is not None and known.state.phase in (Phase.PENDING, Phase.WAITING)
        why = views.job_row(snapshot, known, now())["waiting_for"] if known and stands else ""
        if why != self._since[0]:
            self._since = why, now_s
        if not why or why == self._said or now_s - self._since[1] < WAITS_S:
            return ""
        self._said = why
        return f"{self._job} waits for: {why}"


class Progress:
    """A job's progress, reported when it has changed and at most once per PROGRESS_S."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._said: Json = {}
        self._due_s = 0.0

    def look(self, snapshot: Snapshot, now_s: float) -> Json:
        """The progress to send now; {} if there is nothing new."""
        known = snapshot.cluster.jobs.get(self._job)
        if known is None or now_s < self._due_s:
            return {}
        row = views.job_row(snapshot, known, now())
        said = {key: row[key] for key in ("phase", "step", "steps_per_s", "loss", "world_size", "waiting_for")}
        if said == self._said:
            return {}
        self._said, self._due_s = said, now_s + PROGRESS_S
        return said


def _told(snapshot: Snapshot, job: str) -> tuple[str, ...]:
    """The finished incidents of a job, as text."""
    known = snapshot.cluster.jobs.get(job)
    if known is None:
        return ()
    said = []
    for incident in known.incidents:
        if incident.open:
            continue
        took_s = max(incident.timeline_s.values(), default=None)
        took = f" in {took_s:.2f} s" if took_s is not None else ""
        lost = f", {views.steps_lost(incident)} lost"
        became = f"world {incident.world_size_before} → {incident.world_size_after} again{took}{lost}"
        if not incident.world_size_after:
            became = "the job was given up" if incident.world_size_before else "before the job's first generation"
        said.append(f"{incident.kind} on {incident.node}: {incident.detail}; {became}")
    return tuple(said)


def news(before: Sequence[str], told: Sequence[str]) -> list[str]:
    """The messages in `told` that are not in `before`. Not only at its end: an outage may end after a checkpoint failed
    in it; and the oldest incidents are removed."""
    return list((Counter(told) - Counter(before)).elements())


def _ended(snapshot: Snapshot, job: str) -> bool:
    """Whether nothing more will be logged here for this job."""
    known = snapshot.cluster.jobs.get(job)
    return job not in snapshot.agents and (known is None or known.over)


def post_job(h: Request, query: Query) -> None:
    body = h.body()
    spec, replace = body, False
    if "spec" in body:
        spec, replace = body["spec"], body.get("replace", False)
        if unknown := sorted(body.keys() - {"spec", "replace"}):
            raise Refused(400, f"{unknown[0]}: no such field beside spec and replace")
    if not isinstance(spec, dict):
        raise Refused(400, "spec must be a JSON object")
    if not isinstance(replace, bool):
        raise Refused(400, f"replace = {replace!r}: true or false")
    name = h.service.actions.submit(spec, h.peer(), replace)
    h.service.log.info("job.submitted", job=name, by=h.peer())
    h.send_json(201, {"schema": SCHEMA, "job": name})


def post_stop(h: Request, query: Query, job: str) -> None:
    reason = _text(h.body(), "reason", f"stopped by {h.peer()}")
    h.service.actions.stop(job, reason)
    _done(h, job)


def post_scale(h: Request, query: Query, job: str) -> None:
    h.service.actions.scale(job, _text(h.body(), "nodes"))
    _done(h, job)


def post_checkpoint(h: Request, query: Query, job: str) -> None:
    h.service.actions.checkpoint(job)
    _done(h, job)


def delete_job(h: Request, query: Query, job: str) -> None:
    h.service.actions.forget(job)
    h.send_json(200, {"schema": SCHEMA, "job": job})


def post_cordon(h: Request, query: Query, node: str) -> None:
    h.service.actions.cordon(node, _text(h.body(), "reason", f"cordoned by {h.peer()}"))
    h.send_json(200, {"schema": SCHEMA, "node": node})


def post_uncordon(h: Request, query: Query, node: str) -> None:
    h.service.actions.uncordon(node)
    h.send_json(200, {"schema": SCHEMA, "node": node})


def post_drain(h: Request, query: Query, node: str) -> None:
    body = h.body()
    deadline_s = body.get("deadline_s", 0)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 <= deadline_s <= MAX_DEADLINE_S:
        raise Refused(400, f"deadline_s = {deadline_s!r}: seconds from 0 to {MAX_DEADLINE_S:g}; 0: no deadline")
    h.service.actions.drain(node, _text(body, "reason", f"drained by {h.peer()}"), float(deadline_s))
    h.send_json(200, {"schema": SCHEMA, "node": node})


def _done(h: Request, job: str) -> None:
    known = h.service.board.now.cluster.jobs.get(job)
    h.send_json(200, {"schema": SCHEMA, "job": job, "phase": str(known.state.phase) if known else None})


def _seconds(query: Query, name: str) -> float:
    """Seconds; 0 if not given. Raises Refused (400)."""
    try:
        value = float(query.get(name, 0.0))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise Refused(400, f"{name} = {query[name]!r}: seconds, from 0")
    return value


def _count(query: Query, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not COUNT.fullmatch(text):
        raise Refused(400, f"{name} = {text!r}: a whole number from 0 to 999999999")
    return int(text)


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"{name} = {value!r}: a text is needed")
    if len(value) > MAX_REASON_CHARS:
        raise Refused(400, f"{name} has {len(value)} characters: at most {MAX_REASON_CHARS}")
    return value


def _slot_of(h: Request, job: str, rank: int) -> int:
    """The slot on this node that has `rank` now, or had it last."""
    snapshot = h.service.board.now
    known = snapshot.cluster.jobs.get(job)
    generation = known.generation if known else None
    if generation is None:
        raise Refused(404, f"job {job!r} has no ranks (yet)")
    me = h.service.identity.node
    for slot, its_rank in generation.ranks(me).items():
        if its_rank == rank:
            return slot
    for place in generation.places:
        if rank in generation.ranks(place.node).values():
            raise Refused(404, f"rank {rank} runs on node {place.node!r}: ask there (its logs lie on that node)")
    raise Refused(404, f"job {job!r} has no rank {rank}: its world is {generation.world_size}")


def _elsewhere(h: Request, job: str) -> dict[str, list[int]]:
    known = h.service.board.now.cluster.jobs.get(job)
    if known is None or known.generation is None:
        return {}
    me, generation = h.service.identity.node, known.generation
    return {p.node: sorted(generation.ranks(p.node).values()) for p in generation.places if p.node != me}


def _line(h: Request, job: str, line: Line) -> Json:
    known = h.service.board.now.cluster.jobs.get(job)
    ranks = known.generation.ranks(h.service.identity.node) if known and known.generation else {}
    rank = ranks.get(line.slot) if line.slot is not None else None
    return {"rank": rank, "slot": line.slot, "file": line.source, "line": line.text}


_JOB, _NODE = "(?P<job>[^/]+)", "(?P<node>[^/]+)"
Answer = Callable[..., None]
ROUTES: tuple[tuple[str, re.Pattern[str], Answer], ...] = tuple(
    (verb, re.compile(pattern), answer)
    for verb, pattern, answer in (
        ("GET", "/v1/status", get_status),
        ("GET", "/v1/jobs", get_jobs),
        ("GET", f"/v1/jobs/{_JOB}", get_job),
        ("GET", f"/v1/jobs/{_JOB}/logs", get_logs),
        ("GET", "/v1/nodes", get_nodes),
        ("GET", "/v1/incidents", get_incidents),
        ("GET", "/v1/config", get_config),
        ("POST", "/v1/jobs", post_job),
        ("POST", f"/v1/jobs/{_JOB}/stop", post_stop),
        ("POST", f"/v1/jobs/{_JOB}/scale", post_scale),
        ("POST", f"/v1/jobs/{_JOB}/checkpoint", post_checkpoint),
        ("DELETE", f"/v1/jobs/{_JOB}", delete_job),
        ("POST", f"/v1/nodes/{_NODE}/cordon", post_cordon),
        ("POST", f"/v1/nodes/{_NODE}/uncordon", post_uncordon),
        ("POST", f"/v1/nodes/{_NODE}/drain", post_drain),
    )
)


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
