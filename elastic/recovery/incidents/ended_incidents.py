"""What is done to the records of incidents that are over: causes that are reported late are added, and a record that
another agent has left open is closed."""

from __future__ import annotations

import math

from elastic.contract.records.job_records import Cause, GenerationNode, GenerationRecord, IncidentRecord
from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.structs import replace
from elastic.recovery.facts.evidence import weight
from elastic.recovery.facts.incident import (
    KEPT_CAUSES,
    UNPROVEN,
    Incident,
    begun_again_at,
    cause_fields,
    causes,
    with_wall_times,
)
from elastic.recovery.facts.membership import cut_off, unreached
from elastic.recovery.machine.effects import AddCauses, PutIncident
from elastic.recovery.machine.model import is_leader
from elastic.recovery.machine.turn import Turn


def dropped_nodes(before: GenerationRecord, after: GenerationRecord) -> tuple[GenerationNode, ...]:
    """Nodes of `before` that are not in `after`."""
    return tuple(p for p in before.nodes if after.node_of(p.node, p.incarnation) is None)


def with_lost_nodes(
    turn: Turn, incident: Incident, formed: GenerationRecord, places: tuple[GenerationNode, ...]
) -> Incident:
    """With those nodes of the generation `formed` that are lost or unreachable, of `places`, as causes."""
    known = {(c.generation, c.node) for c in incident.gone}
    known |= {(r.generation, r.node) for r in incident.reports if r.kind == "drain"}  # it left as ordered
    cut = cut_off(turn.etcd.view, turn.peers.dead, formed)
    newest = turn.formed.generation
    decided = newest is None or formed.number != newest.number
    found = []
    for p in places:
        if (formed.number, p.node) in known or not (why := _why_gone(turn, p, cut, decided)):
            continue
        kind, detail = why
        ranks = tuple(sorted(formed.ranks(p.node).values()))
        found.append(Cause(generation=formed.number, node=p.node, kind=kind, ranks=ranks, detail=detail))
    gone_s = tuple((cause.node, turn.now_s) for cause in found if cause.node in turn.etcd.view.members)
    return replace(incident, gone=(*incident.gone, *found), gone_s=(*incident.gone_s, *gone_s)) if found else incident


def _why_gone(turn: Turn, place: GenerationNode, cut: frozenset[str], decided: bool) -> tuple[str, Reason] | None:
    """(kind, evidence) of a lost or unreachable node; None: it is there as far as is known, or leaves as ordered.
    `decided`: the job goes on without it."""
    member = turn.etcd.view.members.get(place.node)
    if (place.node, place.incarnation) in turn.peers.dead:
        return "lost", reason(Code.PORT_REFUSES, node=place.node)
    if place.node in cut:
        return "unreachable", unreached(turn.etcd.view, place.node)
    if not turn.etcd.connected or not turn.etcd.view.has_all_members:
        return None
    if member is not None and member.record.incarnation != place.incarnation:
        return "lost", reason(Code.AGENT_RESTARTED, node=place.node)
    # Absent when the next generation was formed, and registered again since.
    returned = decided and member is not None and member.create_revision > turn.etcd.view.generation_revision
    # Within the time after an outage of etcd, absence alone proves nothing.
    absent = member is None and (decided or turn.now_s >= turn.etcd.absence_ignored_until_s)
    if returned or absent:
        return "lost", reason(Code.LEASE_EXPIRED, node=place.node)
    return None


SWEEP_S = 5.0
"""For how long, from the forming of its generation, a leader leaves an open incident that it has not tracked itself for
another agent to close."""


def put(turn: Turn, incident: Incident, record: IncidentRecord) -> PutIncident:
    bounds = {"stepped_s": incident.stepped_s, "left_wall_s": incident.left_wall_s}
    return PutIncident(
        incident.key, with_wall_times(record, incident.began_s, turn.now_s, incident.noticed_wall_s, **bounds)
    )


def supplement(turn: Turn) -> None:
    """Add what is reported of an incident that is over. An agent that cannot reach etcd at once reports late what only
    it has seen, while the reports of other nodes were enough to recover."""
    over = turn.incidents.closed
    if over is None:
        return
    for report in (*turn.etcd.view.broken_before, turn.etcd.view.broken, turn.formed.broken_record):
        if report is not None:
            over = over.with_report(report)
    if over is turn.incidents.closed:
        return
    turn.incidents = replace(turn.incidents, closed=over)
    mine = turn.formed.broken_record is not None and turn.formed.broken_record.node == turn.policy.node
    if mine or is_leader(turn.agent):
        turn.do(AddCauses(over.incident.key, over.record()))


def supplement_ended(turn: Turn) -> None:
    """The incident that this agent tracked has ended while the agent could not reach etcd, and another one has begun:
    once its record is closed, add the failures of this node's workers to it. No other agent has seen them."""
    incident, node = turn.incidents.followed, turn.policy.node
    over = turn.etcd.view.ended.get(incident.key) if incident is not None else None
    if incident is None or over is None:
        return
    turn.incidents = replace(turn.incidents, followed=None)
    if over.repeat != incident.repeat:
        return
    known = {(cause.generation, cause.node) for cause in over.causes if weight(cause.kind) > 0}
    own = (cause for cause in causes(incident) if cause.node == node and weight(cause.kind) > 0)
    # A generation that has stepped since, and failed then, has done so in another incident.
    if mine := [c for c in own if c.generation < over.generation and (c.generation, node) not in known]:
        every = sorted([*over.causes, *mine], key=lambda c: (c.generation, weight(c.kind) == 0))
        fuller = replace(over, causes=tuple(every[:KEPT_CAUSES]), **cause_fields(every))
        fuller = replace(fuller, begun_again_at=begun_again_at(over.origin, over.step or 0))
        turn.do(AddCauses(incident.key, fuller))


def close_superseded(turn: Turn) -> None:
    """Close the record of an incident that is over by what this agent has seen, but which its leader takes to last: its
    own worker was lost before it had stepped, while a rank of this node has. That failure is another incident."""
    over, seen = turn.incidents.closed, turn.etcd.view.incident
    if over is None or seen is None or over.written or not over.recovered or not is_leader(turn.agent):
        return
    if over.false_alarm:
        return  # another failure of its generation continues it
    if over.is_open(seen):
        key, record = seen
        # That leader has put its own worker's failure there, too.
        record = replace(record, causes=tuple(c for c in record.causes if c.generation < over.generation.number))
        over = replace(over, incident=over.incident.with_recorded(key, record), written=True)
        late = turn.incidents.unwritten
        turn.incidents = replace(
            turn.incidents, closed=over, unwritten=late if late is not None and late.key != key else None
        )
        told = put(turn, over.incident, over.record()).record  # with its times of day
        ended_wall_s = told.wall_s + max(told.timeline_s.values(), default=0.0)
        turn.do(PutIncident(key, replace(told, ended_wall_s=ended_wall_s)))


def close_abandoned(turn: Turn) -> None:
    """Close a record that is left open though the job steps: an earlier leader is gone, or this agent closed the
    incident while its lease had lapsed, when it did not lead."""
    seen = turn.etcd.view.incident
    if seen is None or turn.formed.generation is None:
        return
    steps = (
        turn.progress.settled >= turn.formed.generation.number > turn.formed.broken
        and not turn.lead.halted
        and turn.steps_advance()
        and turn.peers.dead.isdisjoint((p.node, p.incarnation) for p in turn.formed.generation.nodes)
    )
    # What this agent has just closed may still look open.
    if not steps or turn.now_s - turn.formed.formed_at_s <= SWEEP_S or not is_leader(turn.agent):
        return
    number = turn.formed.generation.number
    if any(c.generation >= number and c.kind not in UNPROVEN and weight(c.kind) for c in seen[1].causes):
        return  # this generation has failed, and this agent has not learnt it: no step follows in it
    over = turn.incidents.closed
    if over is not None and over.is_open(seen):
        told = put(turn, over.incident, over.record()).record  # with its times of day
        record = replace(told, ended_wall_s=told.wall_s + max(told.timeline_s.values()))
    else:
        record = replace(
            seen[1], open=False, timeline_s={"stepping": 0.0}, world_size_after=turn.formed.generation.world_size,
            generation=number,
        )  # fmt: skip
        record = with_wall_times(record, turn.now_s, turn.now_s, turn.wall_s)
        if later := min((key for key in turn.etcd.view.repeats if key > seen[0]), default=0):
            record = _ended_before(record, later, turn.etcd.view.ended.get(later))
    turn.ask(PutIncident(seen[0], record), f"incident {seen[0]} {record.repeat}")


def _ended_before(record: IncidentRecord, key: int, following: IncidentRecord | None) -> IncidentRecord:
    """`record` with the end that the incident after it, of this key, shows: the generation that failed then is the one
    that this one ended in, and its failures are not this one's."""
    own = tuple(cause for cause in record.causes if cause.generation < key - 1)
    record = replace(record, generation=key - 1, causes=own)
    if following is None:
        return record
    lasted_s = max(0.0, min(record.ended_wall_s or math.inf, following.wall_s) - record.wall_s)
    return replace(
        record, world_size_after=following.world_size_before, ended_wall_s=record.wall_s + lasted_s,
        timeline_s={"stepping": round(lasted_s, 4)},
    )  # fmt: skip
