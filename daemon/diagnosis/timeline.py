"""The cluster's time line: events that follow from the difference between two views of etcd. Pure but for `Timeline`.

The daemon of the oldest node writes them, once for the cluster; what users request is written where the request is
answered. Agents write none, so that a job needs no access to etcd beyond its own keys.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from elastic.contract.keys import KEPT_EVENTS, ClusterKeys
from elastic.contract.records.job_records import IncidentRecord, Phase, ProtocolVersionMismatch, decode, encode
from elastic.contract.records.node_records import EventRecord
from elastic.etcd.client import MemberHealth, Put
from elasticd.base import answers
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Cluster, Job, Node

from . import gradients, step_time, verdict

TEXT_CHARS = 500
NODE_CHARS = 4_000
"""An incident names all nodes that failed; a batch of events must stay below the 1.5 MiB that etcd takes, whatever a
job's user has written there."""
PENDING = 1_000
"""This many events wait at most until etcd takes them; then the oldest are dropped."""
HANDOVER_S = 60.0
"""The daemon that tells events may be lost with its node, and another one does so only once the lease has ended. It
then tells what it has seen for so long before, and is not on record."""
BATCH = 50
"""etcd takes 128 operations in one transaction."""

Members = Sequence[MemberHealth]


def happened(before: Cluster, after: Cluster, wall_s: float) -> list[EventRecord]:
    """The events between two views, `before` the older one."""
    if before.jobs and after.revision < before.revision:
        return [_event(wall_s, "etcd.replaced", text="etcd came back empty or with older data; agents write their "
                       "jobs back from memory")]  # fmt: skip
    events = list(_of_nodes(before, after, wall_s))
    for name, job in after.jobs.items():
        events += _of_one(job, _of_job(before.jobs.get(name), job, wall_s), wall_s)
    return events


def missed(cluster: Cluster, seen: Sequence[EventRecord] = (), since_wall_s: float = 0.0) -> list[EventRecord]:
    """What was `seen` since then and is not on record; and incidents that began after the newest event that is: no
    daemon saw them begin."""
    on_record = list(read(cluster.events))
    told = {(e.kind, e.job, e.node, e.text) for e in on_record if e.when_wall_s >= since_wall_s}
    newest_s = max((event.when_wall_s for event in on_record), default=0.0)
    events = [
        e for job in cluster.jobs.values() for i in job.incidents for e in _of_one(job, _of_incident(job, None, i))
    ]
    events = [event for event in events if event.when_wall_s > newest_s and event not in seen]
    untold = (e for e in seen if e.when_wall_s >= since_wall_s and (e.kind, e.job, e.node, e.text) not in told)
    return [*untold, *events]


def read(events: Mapping[str, bytes]) -> Iterator[EventRecord]:
    """Those that this version can read, oldest first."""
    for key in sorted(events):
        try:
            yield decode(EventRecord, events[key])
        except (ProtocolVersionMismatch, msgspec.DecodeError):
            continue


def answer(event: EventRecord) -> answers.Event:
    return msgspec.convert(msgspec.to_builtins(event), answers.Event)


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────────


def _event(wall_s: float, kind: str, job: str = "", node: str = "", text: str = "") -> EventRecord:
    return EventRecord(when_wall_s=wall_s, kind=kind, job=job, node=node[:NODE_CHARS], text=text[:TEXT_CHARS])


def _of_one(job: Job, events: Iterator[EventRecord], wall_s: float = 0.0) -> list[EventRecord]:
    """`events` of `job`. Its user can write its records: if they cannot be told, the other jobs' events still are."""
    try:
        return list(events)
    except (ArithmeticError, ValueError, LookupError) as error:
        return [_event(wall_s, "job.untold", job.name, text=f"its records cannot be told: {error}")]


def _of_nodes(before: Cluster, after: Cluster, wall_s: float) -> Iterator[EventRecord]:
    for name in sorted(before.nodes.keys() - after.nodes.keys()):
        jobs = ", ".join(sorted(j.name for j in after.jobs.values() if name in j.members and not j.over))
        row = after.known.get(name)
        held = f", those of its agents of {jobs} have not" if jobs else ""  # of a lost node they do a moment later
        how = f"its lease expired{held}: node lost, or elasticd killed"
        yield _event(wall_s, "node.gone", node=name, text="its elasticd was stopped" if row and row.left else how)
    for name, node in sorted(after.nodes.items()):
        yield from _of_node(before.nodes.get(name), node, wall_s)


def _of_node(old: Node | None, new: Node, wall_s: float) -> Iterator[EventRecord]:
    record, name = new.record, new.name
    if old is None:
        slots = f"{record.slots} slots" + (f", {record.gpus} GPUs" if record.gpus else "")
        where = f"{record.hostname}, {record.address}"
        yield _event(wall_s, "node.came", node=name, text=f"{where}, {slots}, elasticd {record.version}")
        return
    if old.record.started_wall_s != record.started_wall_s:
        yield _event(wall_s, "node.restarted", node=name, text=f"elasticd {record.version} started anew")
    if old.record.healthy != record.healthy:
        kind = "node.healthy" if record.healthy else "node.unhealthy"
        yield _event(wall_s, kind, node=name, text=str(record.reason or ""))
    if record.draining and not old.record.draining and not new.drain:
        yield _event(wall_s, "node.draining", node=name, text=str(record.draining))


def _of_job(old: Job | None, new: Job, wall_s: float) -> Iterator[EventRecord]:
    phase, reason = new.state.phase, str(new.state.reason)
    if old is not None and old.state.phase is not phase:
        yield _event(wall_s, f"job.{phase}", job=new.name, text=reason)
    elif old is None and phase is not Phase.PENDING:
        yield _event(wall_s, f"job.{phase}", job=new.name, text=f"written back to etcd; {reason}".rstrip("; "))
    was = old.state.excluded_nodes if old else ()
    for node in sorted(set(new.state.excluded_nodes) - set(was)):
        no_agent = new.state.no_agent.get(node)
        why = f"the job cannot be started there: {no_agent}" if no_agent else "the job's workers fail there more often"
        yield _event(wall_s, "node.excluded", new.name, node, why)
    for node in sorted(set(was) - set(new.state.excluded_nodes)):
        yield _event(wall_s, "node.readmitted", new.name, node, f"{new.name} may use it again")
    formed, previous = new.generation, old.generation if old else None
    if formed is not None and (previous is None or formed.number > previous.number):
        if previous is not None and formed.before > previous.number:  # one view shows only the newest
            first = previous.number + 1
            missing = f"generation {first}" if first == formed.before else f"generations {first} to {formed.before}"
            text = f"{missing}: replaced by {formed.number} before it was seen here"
            yield _event(wall_s, "generation.formed", job=new.name, text=text)
        nodes = ", ".join(place.node for place in formed.nodes[:8]) + (" …" if len(formed.nodes) > 8 else "")
        ranks = f"{formed.world_size} rank{'' if formed.world_size == 1 else 's'}"
        text = f"generation {formed.number}: {ranks} on {nodes} ({formed.why})"
        yield _event(wall_s, "generation.formed", job=new.name, text=text)
    if (resumed := _resumed(new)) and resumed != (_resumed(old) if old else ""):
        yield _event(wall_s, "job.resumed", job=new.name, text=resumed)
    if new.ranks and (old is None or old.ranks != new.ranks):
        yield from _of_ranks(old, new, wall_s)
    if old is None or old.incidents != new.incidents:
        before = {i.id: i for i in old.incidents} if old is not None and old.submitted == new.submitted else {}
        for incident in new.incidents:
            yield from _of_incident(new, before.get(incident.id), incident)


def _resumed(job: Job) -> str:
    progress = job.progress
    if progress is None or progress.resumed_step is None:
        return ""
    return f"resumed from step {progress.resumed_step}: {progress.resumed_from}"


def _of_ranks(old: Job | None, new: Job, wall_s: float) -> Iterator[EventRecord]:
    """Ranks that have become slow, and what a new sample of the gradients says."""
    formed = new.generation
    if formed is None or new.over:
        return
    before = {slow.rank for slow in step_time.slow_ranks(old.ranks, formed.number)} if old else set()
    for slow in step_time.slow_ranks(new.ranks, formed.number):
        if slow.rank not in before:
            text = f"rank {slow.rank} takes {slow.ratio:g} times as long for a step as the median of the others"
            yield _event(wall_s, "rank.slow", new.name, slow.node, text)
    step, samples = gradients.newest(new.ranks, formed.number, formed.world_size)
    if step and (old is None or step != gradients.newest(old.ranks, formed.number, formed.world_size)[0]):
        for text in gradients.findings(samples):
            yield _event(wall_s, "job.gradients", new.name, text=f"step {step}: {text}")


def _of_incident(job: Job, old: IncidentRecord | None, new: IncidentRecord) -> Iterator[EventRecord]:
    """At the instants that the record itself names."""
    judged = verdict.judge(new, verdict.VerdictContext(phase=job.state.phase))
    if verdict.has_cause(new) and not (old and verdict.has_cause(old)):
        yield _event(new.wall_s, "incident.opened", job.name, new.node, f"{judged.cls}: {judged.what}")
    if not new.open and (old is None or old.open) and new.ended_wall_s:
        took = f"after {new.took_s or 0.0:.2f} s{' without a step' if new.still_s else ''}"
        yield _event(new.ended_wall_s, "incident.closed", job.name, new.node, f"{took}: {judged.done}")


# ── writing them ────────────────────────────────────────────────────────────────────────────────────────────


class Timeline:
    """What one daemon has yet to write. Owned by the loop's thread."""

    def __init__(self, keys: ClusterKeys, node: str) -> None:
        self._keys = keys
        self._node = node
        self._before: Cluster | None = None
        self._caught_up = False
        self._seen: deque[EventRecord] = deque(maxlen=PENDING)
        """While another node was the oldest one, whose daemon tells them."""
        self._members: Members = ()
        self._lost_wall_s: float | None = None
        self._tells_outage = False
        """Whether this node was the oldest one when contact was lost."""
        self._error = ""
        self._pending: deque[Put] = deque(maxlen=PENDING)

    def look(self, cluster: Cluster, wall_s: float) -> None:
        before, self._before = self._before, cluster
        events = happened(before, cluster, wall_s) if before is not None else []
        if not reconcile.is_oldest(cluster, self._node):
            self._caught_up = False
            self._seen += events
            return
        if not self._caught_up:
            self._add(missed(cluster, self._seen, wall_s - HANDOVER_S))
            self._caught_up = True
            self._seen.clear()
        self._add(events)

    def contact(self, connected: bool, error: str, wall_s: float) -> None:
        """Whether etcd can be reached, at each view."""
        if not connected:
            if self._before is not None and self._lost_wall_s is None:
                self._lost_wall_s, self._tells_outage = wall_s, reconcile.is_oldest(self._before, self._node)
            self._error = error or self._error
        elif self._lost_wall_s is not None:
            if self._tells_outage:  # this node's own lease may have ended meanwhile
                away_s, error = wall_s - self._lost_wall_s, self._error or "no answer"
                lost = _event(self._lost_wall_s, "etcd.lost", text=f"unreachable from {self._node}: {error}")
                text = f"reachable from {self._node} again after {away_s:.1f} s"
                self._add([lost, _event(wall_s, "etcd.back", text=text)])
            self._lost_wall_s, self._error = None, ""

    def members(self, members: Members, wall_s: float) -> None:
        """An answer by which none is up is of an outage, which `contact` tells, and may be older than its end."""
        if members and not any(member.ok for member in members):
            return
        if self._before is not None and reconcile.is_oldest(self._before, self._node):
            were_up = {member.endpoint: member.ok for member in self._members}  # none for the first answer
            for member in members:
                if were_up.get(member.endpoint, member.ok) != member.ok:
                    kind, error = ("etcd.member_up", "") if member.ok else ("etcd.member_down", f": {member.error}")
                    good = f"{sum(one.ok for one in members)} of {len(members)} members are up"
                    self._add([_event(wall_s, kind, text=f"{member.endpoint}{error}; {good}")])
        self._members = members

    def send(self, write: Callable[[Sequence[Put]], bool]) -> None:
        """Hand over what is due. `write` returns False if an earlier write is still under way."""
        batch = [self._pending[i] for i in range(min(BATCH, len(self._pending)))]
        if batch and write(batch):
            for _ in batch:
                self._pending.popleft()

    def too_old(self, cluster: Cluster) -> list[str]:
        """Keys of events to delete."""
        excess = len(cluster.events) - KEPT_EVENTS
        if excess <= 0 or not reconcile.is_oldest(cluster, self._node):
            return []
        return sorted(cluster.events)[: min(excess, BATCH)]

    def _add(self, events: Sequence[EventRecord]) -> None:
        for event in events:
            raw = encode(event)
            unique = hashlib.sha256(raw).hexdigest()[:8]  # the same event twice is one
            self._pending.append(Put(self._keys.event(event.when_wall_s, self._node, unique), raw))
