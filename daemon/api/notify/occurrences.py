"""What to notify: which occurrences follow from what a daemon has seen before and what it sees now. Pure.

Level-triggered: jobs and incidents stay in etcd, so that a look that comes late misses none. Every daemon looks, so
that each knows what was there already, and the daemon of the oldest node sends: once for the cluster.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.contract.keys import LAST_WALL_S
from elastic.contract.origin import Origin
from elastic.contract.records.job_records import IncidentRecord, Phase
from elasticd.api.views import views
from elasticd.api.views.instant import Now
from elasticd.base.masking import masked_text
from elasticd.base.settings import NotifySettings
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis.rules import Class

SCHEMA = 1
"""Version of the JSON. Fields may be added under the same version."""
SETTLE_S = 10.0
"""An incident is notified when it is over, at the latest this long after it was first seen: with its outcome."""
FAILED_SETTLE_S = 2.0
"""After a job's failure its incident may still be on its way to etcd."""
REPEAT_S = 30.0
"""What came due so shortly before this daemon started, or took over from another one, is notified: the daemon before it
may have been gone already. If it was not, the notification is a second one with the same id."""
KEPT = 5_000
"""So many occurrences are remembered after they are gone from etcd: one that comes back is not new."""
TEXT_CHARS = 500

Key = tuple[str, str, str, str]
"""Event, job, its submission, and the incident's id or since when the job is in its phase."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    id: str
    event: str
    job: str
    node: str
    wall_s: float
    why: str
    verdict: Mapping[str, Any] | None
    """class, cause, person and fix, as in docs/api.md; None: no incident belongs to it."""


@dataclass(frozen=True, slots=True)
class SeenOccurrence:
    seen_s: float
    due_s: float | None = None
    """When it was first seen to be due; None: it is not yet."""
    told: bool = False
    """By this daemon, or it is never to be told."""


@dataclass(frozen=True, slots=True)
class Memory:
    began_wall_s: float
    """When this daemon started."""
    known: Mapping[Key, SeenOccurrence] = field(default_factory=dict)
    sends: bool = False
    """Whether this node was the oldest one at the last look."""
    queued_s: Mapping[str, float] = field(default_factory=dict)
    """Job -> when it was last seen in the queue: that is no wait to be told of, and what follows begins then."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    key: Key
    job: Job
    began_wall_s: float
    wall_s: float
    """When it is due by the clock of its record."""
    settle_s: float
    """How long after it was first seen it is due."""
    record: IncidentRecord | None


def look(
    memory: Memory, snapshot: Snapshot, me: str, settings: NotifySettings, now: Now
) -> tuple[Memory, list[Occurrence]]:
    """What to send from the node `me` now, in the order of the jobs' names."""
    if not snapshot.contact.connected:  # what is known is old, and another node may have taken over
        return replace(memory, sends=False), []
    sends = reconcile.is_oldest(snapshot.cluster, me)
    now_s, wall_s = now.monotonic_s, now.wall_s
    since_s = now_s if memory.sends else now_s - REPEAT_S
    known: dict[Key, SeenOccurrence] = {}
    found: list[Occurrence] = []
    jobs = snapshot.cluster.jobs
    queued_s = {name: s for name, s in memory.queued_s.items() if name in jobs}
    queued_s |= {name: now_s for name, job in jobs.items() if _queued(snapshot, job)}
    waits_wall_s = {name: wall_s - (now_s - s) for name, s in queued_s.items()}
    candidates = {each.key: each for each in _candidates(snapshot, settings, wall_s, waits_wall_s)}
    for candidate in candidates.values():
        entry = memory.known.get(candidate.key) or SeenOccurrence(now_s)
        if entry.due_s is None and now_s - entry.seen_s >= candidate.settle_s:
            too_old = candidate.wall_s < memory.began_wall_s - REPEAT_S
            entry = SeenOccurrence(entry.seen_s, now_s, told=too_old or _is_planned(snapshot, candidate, now))
        if sends and not entry.told and entry.due_s is not None:
            if entry.due_s >= since_s:
                found.append(_occurrence(snapshot, candidate, now))
            entry = SeenOccurrence(entry.seen_s, entry.due_s, told=True)
        known[candidate.key] = entry
    gone = [(key, entry) for key, entry in memory.known.items() if key not in candidates]
    return Memory(memory.began_wall_s, dict(gone[-KEPT:]) | known, sends, queued_s), found


def as_json(occurrence: Occurrence, cluster: str, sender: str) -> dict[str, Any]:
    """The body of a notification, as docs/operating.md describes it. `sender`: the node that sends it."""
    o = occurrence
    seconds = min(max(o.wall_s, 0.0), LAST_WALL_S)
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
    place = f" on {o.node}" if o.node and o.node not in o.why else ""
    fix = f" To do: {o.verdict['fix']}" if o.verdict and o.verdict["person"] else ""
    return {
        "schema": SCHEMA,
        "id": o.id,
        "event": o.event,
        "cluster": cluster,
        "job": o.job,
        "node": o.node,
        "time": when,
        "why": o.why,
        "verdict": dict(o.verdict) if o.verdict else None,
        "sender": sender,
        "text": f"{cluster}: {o.event.replace('_', ' ')}: {o.job}{place}: {o.why.rstrip('.')}.{fix}",
    }


# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────


def _candidates(
    snapshot: Snapshot, settings: NotifySettings, wall_s: float, waits_wall_s: Mapping[str, float]
) -> Iterator[_Candidate]:
    """`waits_wall_s`: job -> when it left the queue."""
    for name, job in sorted(snapshot.cluster.jobs.items()):
        if job.spec is None:
            continue  # etcd has lost it: until agents write it back it is not known which job has the name
        state, since_wall_s, submission = job.state, job.state.since_wall_s, job.spec.submission
        if state.phase is Phase.FAILED and "job_failed" in settings.on:
            key = ("job_failed", name, submission, repr(since_wall_s))
            yield _Candidate(key, job, since_wall_s, since_wall_s, FAILED_SETTLE_S, _fatal(job))
        if state.phase in (Phase.PENDING, Phase.WAITING) and "job_waiting" in settings.on:
            due_wall_s = max(since_wall_s, waits_wall_s.get(name, 0.0)) + settings.job_waiting_s
            if wall_s >= due_wall_s and not _queued(snapshot, job):
                key = ("job_waiting", name, submission, repr(since_wall_s))
                yield _Candidate(key, job, since_wall_s, due_wall_s, 0.0, None)
        for record in job.incidents:
            event = "checkpoint_failed" if record.kind == "checkpoint" else "incident"
            if event in settings.on:
                key, settle_s = (event, name, submission, record.id), SETTLE_S if record.open and not job.over else 0.0
                yield _Candidate(key, job, record.wall_s, record.wall_s, settle_s, record)


def _queued(snapshot: Snapshot, job: Job) -> bool:
    return job.state.phase is Phase.PENDING and job.name in snapshot.plan.queue


def _fatal(job: Job) -> IncidentRecord | None:
    """The incident with which the job failed."""
    last = next((i for i in reversed(job.incidents) if i.kind not in ("checkpoint", "late exit")), None)
    return last if last and (last.open or last.origin is Origin.NOTHING) else None


# ── in words ────────────────────────────────────────────────────────────────────────────────────────────────


def _is_planned(snapshot: Snapshot, candidate: _Candidate, now: Now) -> bool:
    """Whether it is an incident that was asked for, as a drain or a new node."""
    if candidate.record is None or candidate.key[0] != "incident":
        return False
    return views.incident(snapshot, candidate.job, candidate.record, now).verdict.cls == Class.PLANNED


def _occurrence(snapshot: Snapshot, candidate: _Candidate, now: Now) -> Occurrence:
    event, name, *_ = candidate.key
    job, record, began_wall_s = candidate.job, candidate.record, candidate.began_wall_s
    verdict = views.incident(snapshot, job, record, now).verdict if record else None
    if event == "job_failed":
        why = str(job.state.reason) or "it failed; no reason is on record"
    elif event == "job_waiting" or verdict is None:
        why = _why(snapshot, job, now)
    else:
        held = f"; waits for {verdict.held_by}" if verdict.held_by else ""
        why = f"{verdict.what}; {verdict.done}{held}"
    return Occurrence(
        id=f"{name}/{event}/{began_wall_s:.3f}",
        event=event,
        job=name,
        node=record.node if record else "",
        wall_s=began_wall_s,
        why=_line(why),
        verdict={"class": verdict.cls, "cause": _line(verdict.cause), "person": verdict.person, "fix": verdict.fix}
        if verdict
        else None,
    )


def _why(snapshot: Snapshot, job: Job, now: Now) -> str:
    try:
        return views.job_row(snapshot, job, now).why
    except (OverflowError, ValueError, OSError):  # a time on record that is no date: the job's agents wrote it
        return str(job.state.reason) or f"it is {job.state.phase}"


def _line(text: str) -> str:
    return " ".join(masked_text(text).split())[:TEXT_CHARS]
