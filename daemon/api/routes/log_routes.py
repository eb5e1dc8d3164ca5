"""`GET /v1/jobs/JOB/logs`: the output of a job's workers, on this node and on the others. See docs/api.md."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from elastic.contract.records.job_records import Phase
from elasticd.access.authority import owns
from elasticd.agents.logs import PAST_BYTES, Line, Tail
from elasticd.api import request
from elasticd.api.actions import job_of
from elasticd.api.request import Query, Request
from elasticd.api.views import views
from elasticd.api.views.instant import now
from elasticd.base import answers
from elasticd.base.answers import Json
from elasticd.base.errors import Refused
from elasticd.cluster.cluster import Job
from elasticd.cluster.published_state import Snapshot
from elasticd.node.asks import ask_each

from .job_routes import asking, other_nodes

FAR_S = 1.0
"""Interval at which the daemon of another node is asked for more lines."""
BACKLOG_CHARS = 32 * 1024
"""After so many it is asked again at once."""
FOLLOW_S = 0.2
"""Polling interval of a followed log."""
MOVED_S = 5.0
"""How long the owner of a new job waits for the logs of an earlier job of that name to be moved away."""
PROGRESS_S = 0.5
"""Minimum interval between progress messages to a follower."""
WAITS_S = 2.0
"""How long a job must have waited for something before its followers are told."""
NAME_REUSED = "a newer job uses this name; its log is not shown here"


def get_logs(h: Request, query: Query, job: str) -> None:
    """Lines of this node's workers, then, unless another node's daemon asks, of the other nodes' workers."""
    published, here = h.service.published, "here" in query
    rank = request.count(query, "rank", 0) if "rank" in query else None
    slot = _slot_of(h, job, rank) if rank is not None else None
    if rank is not None and slot is None:
        _far_rank(h, query, job, rank)
        return
    current, folder = published.now.cluster.jobs.get(job), h.service.logs(job)
    peer, authority, submission = h.peer(), h.service.authority, _submission(current)
    authority.check_logs(peer, job, current.spec if current else None, _folder_uid(h, job))
    since_s = request.seconds(query, "since_s")
    tail = Tail(folder, slot, previous=request.flag(query, "previous"),
                since_wall_s=time.time() - since_s if since_s else 0.0,
                owner=None if authority.is_admin(peer) else peer.uid,
                submission="" if request.flag(query, "earlier") else submission or "")  # fmt: skip
    last = tail.more_from(_offsets(query)) if "offsets" in query else tail.last(request.count(query, "tail", 100))
    if not last:
        job_of(published.now, job)
    h.begin_stream()
    if tail.cut:
        h.stream({"note": f"of the lines asked for, only the last {len(last)} are shown: as many as were found in the "
                          f"newest {PAST_BYTES // 2**20} MiB", "cut": True})  # fmt: skip
    for line in last:
        h.stream(_line(h, job, line))
    elsewhere = _elsewhere(h, job) if rank is None else {}
    if not here:
        elsewhere = _other_nodes_lines(h, query, job, elsewhere)
    if request.flag(query, "follow"):
        _follow(h, tail, query, job, submission)
    if not here or request.flag(query, "rest"):
        for line in tail.rest():
            h.stream(_line(h, job, line))
    _end(h, job, submission, {"elsewhere": elsewhere} | ({"offsets": tail.offsets} if here else {}))


def _end(h: Request, job: str, submission: str | None, said: Json) -> None:
    snapshot = h.service.published.now
    current = None if _name_is_reused(snapshot, job, submission) else snapshot.cluster.jobs.get(job)
    h.stream({"end": True, "phase": str(current.state.phase) if current else None, **said})
    h.end_stream()


def _follow(h: Request, tail: Tail, query: Query, job: str, submission: str | None) -> None:
    """Stream what is written, and what happens to the job, until it is over here or the reader has gone. A later job of
    the same name may be another user's: the reader was checked for this `submission` only."""
    published, follow = h.service.published, True
    reported, waits = _incident_messages(published.now, job), Waits(job)
    progress = ProgressReports(job) if request.flag(query, "progress") else None
    while follow and h.still_there() and not _name_is_reused(published.now, job, submission):
        waited = waits.look(published.now, time.monotonic())
        before, reported = reported, _incident_messages(published.now, job)
        for note in filter(None, (waited, *new_messages(before, reported))):
            h.stream({"note": note})
        if progress and (row := progress.look(published.now, time.monotonic())):
            h.stream({"progress": msgspec.to_builtins(row)})
        for line in tail.more():
            h.stream(_line(h, job, line))
        seen = published.wait(lambda s: _ended(s, job) or _name_is_reused(s, job, submission), FOLLOW_S)
        follow = not _ended(seen, job)
    if _name_is_reused(published.now, job, submission):
        h.stream({"note": NAME_REUSED, "cut": True})
        return
    for line in tail.more():
        h.stream(_line(h, job, line))


def _folder_uid(h: Request, job: str) -> int | None:
    """Owner of the folder that holds the job's logs here. One that an earlier job of another user has left is moved
    away when the agent of the new job starts: its owner may ask before that."""
    peer, end_s = h.peer(), time.monotonic() + MOVED_S
    while (uid := h.service.logs(job).owner()) not in (None, peer.uid) and time.monotonic() < end_s:
        current = h.service.published.now.cluster.jobs.get(job)
        if current is None or current.spec is None or current.over or not owns(peer, current.spec):
            break
        h.service.published.wait(lambda s: _ended(s, job), FOLLOW_S)
    return uid


def _other_nodes_lines(h: Request, query: Query, job: str, elsewhere: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Stream the earlier lines of the workers on other nodes. Returns the ranks whose lines were not to be had."""
    asked = _asked(query)
    if not elsewhere or asked.get("tail") == "0":
        return dict(elsewhere)
    missing = {}
    for node, answer in ask_each(h.service.asker, sorted(elsewhere), f"/v1/jobs/{job}/logs", asked, asking(h)).items():
        if "error" in answer:
            missing[node] = elsewhere[node]
            h.stream({"note": f"no lines from {node}: {answer['error']}", "cut": True})
        else:
            _far_lines(h, node, answer)
    return missing if not request.flag(query, "follow") else dict(elsewhere)


def _asked(query: Query) -> dict[str, object]:
    """What another node is asked for first; also a last line that has not ended, if nothing follows."""
    asked: dict[str, object] = {key: query[key] for key in ("tail", "since_s", "previous", "earlier") if key in query}
    return asked if request.flag(query, "follow") else asked | {"rest": 1}


def _far_rank(h: Request, query: Query, job: str, rank: int) -> None:
    published = h.service.published
    current = published.now.cluster.jobs.get(job)
    submission = _submission(current)
    h.service.authority.check_logs(h.peer(), job, current.spec if current else None, None)
    nodes = other_nodes(published.now, job, h.service.identity.node, rank)
    if "here" in query or not nodes:
        raise Refused(404, f"rank {rank} of job {job!r} is not on node {h.service.identity.node} (any more)")
    # Raises before the stream begins.
    answer = h.service.asker.ask(nodes[0], f"/v1/jobs/{job}/logs", _asked(query) | {"rank": rank}, asking(h))
    h.begin_stream()
    _far_lines(h, nodes[0], answer)
    if request.flag(query, "follow"):
        _follow_far(h, job, rank, nodes[0], _offsets_in(answer), submission)
    _end(h, job, submission, {"elsewhere": {}})


def _follow_far(h: Request, job: str, rank: int, node: str, offsets: object, submission: str | None) -> None:
    """Ask for more lines every FAR_S, wherever the rank is, until the job is over and all its lines are here."""
    published, path, over, rest, error = h.service.published, f"/v1/jobs/{job}/logs", False, False, ""
    while h.still_there():
        if _name_is_reused(published.now, job, submission):
            h.stream({"note": NAME_REUSED, "cut": True})
            return
        ended = over  # before asking: then nothing is written any more
        there = other_nodes(published.now, job, h.service.identity.node, rank)
        if not over and node not in there:
            if not there:
                h.stream({"note": f"rank {rank} has left {node}, and is on no other node now: ask again", "cut": True})
                return
            node, offsets = there[0], None  # its log there is another one
            h.stream({"note": f"rank {rank} is on {node} now"})
        asked: dict[str, object] = {"rank": rank, "rest": int(rest)}
        asked |= {"offsets": json.dumps(offsets)} if offsets is not None else {}
        answer = ask_each(h.service.asker, [node], path, asked, asking(h))[node]
        before, chars = error, 0
        if error := str(answer.get("error", "")):
            if ended or error != before:
                h.stream({"note": f"no lines of rank {rank} now: {error}", "cut": ended})
            if ended:
                return
        else:
            chars, since = _far_lines(h, node, answer), offsets
            offsets = _offsets_in(answer)
            if rest:
                return
            rest = ended and offsets == since  # all whole lines are here: only a last one without an end may follow
        over = over or _over(published.wait(lambda s: _over(s, job), 0.0 if chars >= BACKLOG_CHARS else FAR_S), job)


def _far_lines(h: Request, node: str, answer: Mapping[str, Any]) -> int:
    """Stream the lines that `node` has answered, and what it says of lines left out. Returns their characters."""
    chars = 0
    for message in answer["lines"]:
        if "line" in message:
            chars += len(message["line"])
            h.stream(message | {"node": node})
        elif "note" in message:
            h.stream(message | {"note": f"{node}: {message['note']}"})
    return chars


def _offsets_in(answer: Mapping[str, Any]) -> object:
    """As the next question has them; None: the answer has none."""
    return answer["lines"][-1].get("offsets") if answer["lines"] else None


def _over(snapshot: Snapshot, job: str) -> bool:
    current = snapshot.cluster.jobs.get(job)
    return current is None or current.over


def _offsets(query: Query) -> dict[str, int]:
    """File -> offset, as an earlier answer gave them. Raises Refused (400)."""
    try:
        offsets = msgspec.json.decode(query["offsets"], type=dict[str, int])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise Refused(400, f"offsets = {query['offsets'][:200]!r}: a JSON object of file names and numbers") from None
    return {name: offset for name, offset in offsets.items() if offset >= 0}


class Waits:
    """Reports what a job that makes no step yet waits for, once it has waited for that for a while."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._since: tuple[str, float] = ("", 0.0)
        self._said = ""

    def look(self, snapshot: Snapshot, now_s: float) -> str:
        """The message to send now; '' if there is none."""
        current = snapshot.cluster.jobs.get(self._job)
        stands = current is not None and current.state.phase in (Phase.PENDING, Phase.WAITING)
        why = views.job_row(snapshot, current, now()).waiting_for if current and stands else ""
        if why != self._since[0]:
            self._since = why, now_s
        if not why or why == self._said or now_s - self._since[1] < WAITS_S:
            return ""
        self._said = why
        return f"{self._job} {'' if self._job in snapshot.plan.never else 'waits for: '}{why}"


class ProgressReports:
    """A job's progress, reported when it has changed and at most once per PROGRESS_S."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._sent: answers.Progress | None = None
        self._due_s = 0.0

    def look(self, snapshot: Snapshot, now_s: float) -> answers.Progress | None:
        """The progress to send now; None if there is nothing new."""
        current = snapshot.cluster.jobs.get(self._job)
        if current is None or now_s < self._due_s:
            return None
        progress = msgspec.convert(views.job_row(snapshot, current, now()), answers.Progress, from_attributes=True)
        if progress == self._sent:
            return None
        self._sent, self._due_s = progress, now_s + PROGRESS_S
        return progress


def _incident_messages(snapshot: Snapshot, job: str) -> tuple[str, ...]:
    current = snapshot.cluster.jobs.get(job)
    if current is None:
        return ()
    messages = []
    for incident in (each for each in current.incidents if not each.open):
        took = f" in {incident.took_s:.2f} s" if incident.took_s is not None else ""
        lost = f", {'an unknown number of steps' if incident.steps_lost is None else views.steps_lost(incident)} lost"
        became = f"world {incident.world_size_before} → {incident.world_size_after} again{took}{lost}"
        if not incident.world_size_after and incident.world_size_before:
            stopped = current.state.phase in (Phase.STOPPING, Phase.STOPPED)
            if not stopped and current.state.phase is not Phase.FAILED:
                continue  # the job went on: the incident of its next failure tells of this one, too
            became = f"the job was {'stopped' if stopped else 'given up'}"
        elif not incident.world_size_after:
            became = "before the job's first generation"
        where = f" on {incident.node}" if incident.node else ""  # a planned change has none
        messages.append(f"{incident.kind}{where}: {incident.text}; {became}")
    return tuple(messages)


def new_messages(before: Sequence[str], told: Sequence[str]) -> list[str]:
    """The messages in `told` that are not in `before`. Not only at its end: an outage may end after a checkpoint failed
    in it; and the oldest incidents are removed."""
    return list((Counter(told) - Counter(before)).elements())


def _submission(known: Job | None) -> str | None:
    """None: its description is not known."""
    return known.spec.submission if known and known.spec else None


def _name_is_reused(snapshot: Snapshot, job: str, submission: str | None) -> bool:
    """Whether the name is that of a later job than `submission`."""
    return submission is not None and _submission(snapshot.cluster.jobs.get(job)) not in (None, submission)


def _ended(snapshot: Snapshot, job: str) -> bool:
    """Whether nothing more will be logged here for this job."""
    current = snapshot.cluster.jobs.get(job)
    return job not in snapshot.agents and (current is None or current.over)


def _slot_of(h: Request, job: str, rank: int) -> int | None:
    """The slot on this node that has `rank` now, or had it last; None: it is on another node."""
    snapshot = h.service.published.now
    current = snapshot.cluster.jobs.get(job)
    generation = current.generation if current else None
    if generation is None:
        raise Refused(404, f"job {job!r} has no ranks (yet)")
    for place in generation.nodes:
        for slot, its_rank in generation.ranks(place.node).items():
            if its_rank == rank:
                return slot if place.node == h.service.identity.node else None
    raise Refused(404, f"job {job!r} has no rank {rank}: its world is {generation.world_size}")


def _elsewhere(h: Request, job: str) -> dict[str, list[int]]:
    """Other nodes that have workers of the job -> their ranks."""
    snapshot = h.service.published.now
    current = snapshot.cluster.jobs.get(job)
    generation = current.generation if current else None
    nodes = other_nodes(snapshot, job, h.service.identity.node)
    return {node: sorted(generation.ranks(node).values()) if generation else [] for node in nodes}


def _line(h: Request, job: str, line: Line) -> dict[str, Any]:
    current = h.service.published.now.cluster.jobs.get(job)
    ranks = current.generation.ranks(h.service.identity.node) if current and current.generation else {}
    rank = ranks.get(line.slot) if line.slot is not None else None
    return {"rank": rank, "slot": line.slot, "file": line.source, "line": line.text}
