"""What is done to the records of incidents that are over: causes that are reported late are added, and a record that
another agent has left open is closed."""

from __future__ import annotations

import math

from msgspec.structs import replace

from elastic.contract.records.job_records import Cause, GenerationNode, GenerationRecord, IncidentRecord
from elastic.recovery.facts.evidence import weight
from elastic.recovery.facts.incident import KEPT_CAUSES, UNPROVEN, Incident, begun_anew, causes, dated, named
from elastic.recovery.facts.membership import cut_off, unreached
from elastic.recovery.machine.effects import AddCauses, PutIncident
from elastic.recovery.machine.model import is_leader
from elastic.recovery.machine.turn import Turn


def left_out(before: GenerationRecord, after: GenerationRecord) -> tuple[GenerationNode, ...]:
    """The nodes of a generation that the next one does without."""
    return tuple(p for p in before.nodes if after.node_of(p.node, p.incarnation) is None)


def with_gone(turn: Turn, incident: Incident, formed: GenerationRecord, places: tuple[GenerationNode, ...]) -> Incident:
    """With those nodes of the generation `formed` that are lost or unreachable, of `places`, as causes."""
    known = {(c.generation, c.node) for c in incident.gone}
    known |= {(r.generation, r.node) for r in incident.reports if r.kind == "drain"}  # it left as ordered
    cut = cut_off(turn.agent.etcd.view, turn.agent.peers.dead, formed)
    found = []
    for p in places:
        if (formed.number, p.node) in known or not (
            said := _why_gone(turn, p, cut, formed is not turn.agent.formed.generation)
        ):
            continue
        kind, detail = said
        ranks = tuple(sorted(formed.ranks(p.node).values()))
        found.append(Cause(generation=formed.number, node=p.node, kind=kind, ranks=ranks, detail=detail))
    gone_s = tuple((cause.node, turn.now_s) for cause in found if cause.node in turn.agent.etcd.view.members)
    return replace(incident, gone=(*incident.gone, *found), gone_s=(*incident.gone_s, *gone_s)) if found else incident


def _why_gone(turn: Turn, place: GenerationNode, cut: frozenset[str], decided: bool) -> tuple[str, str] | None:
    """(kind, evidence) of a lost or unreachable node; None: it is there as far as is known, or leaves as ordered.
    `decided`: the job goes on without it."""
    agent, member = turn.agent, turn.agent.etcd.view.members.get(place.node)
    if (place.node, place.incarnation) in agent.peers.dead:
        return "lost", f"node {place.node} is gone: its agent's port refuses connections"
    if place.node in cut:
        return "unreachable", unreached(agent.etcd.view, place.node)
    if not agent.etcd.connected or not agent.etcd.view.whole:
        return None
    if member is not None and member.record.incarnation != place.incarnation:
        return "lost", f"node {place.node} is gone: its agent was started anew"
    # Absent when the next generation was formed, and registered again since.
    returned = decided and member is not None and member.create_revision > agent.etcd.view.generation_revision
    # Within the time after an outage of etcd, absence alone proves nothing.
    absent = member is None and (decided or turn.now_s >= agent.etcd.absence_ignored_until_s)
    if returned or absent:
        return "lost", f"node {place.node} is gone: its agent's lease has run out"
    return None


SWEEP_S = 5.0
"""For how long, from the forming of its generation, a leader leaves an open incident that it has not tracked itself for
another agent to close."""


def put(turn: Turn, incident: Incident, record: IncidentRecord) -> PutIncident:
    bounds = {"stepped_s": incident.stepped_s, "left_wall_s": incident.left_wall_s}
    return PutIncident(incident.key, dated(record, incident.began_s, turn.now_s, incident.noticed_wall_s, **bounds))


def supplement(turn: Turn) -> None:
    """Add what is reported of an incident that is over. An agent that cannot reach etcd at once reports late what only
    it has seen, while the reports of other nodes were enough to recover."""
    agent, over = turn.agent, turn.agent.incidents.closed
    if over is None:
        return
    for report in (*agent.etcd.view.broken_before, agent.etcd.view.broken, agent.formed.broken_record):
        if report is not None:
            over = over.with_report(report)
    if over is agent.incidents.closed:
        return
    turn.change(closed=over)
    mine = agent.formed.broken_record is not None and agent.formed.broken_record.node == turn.policy.node
    if mine or is_leader(turn.agent):
        turn.do(AddCauses(over.incident.key, over.record()))


def supplement_ended(turn: Turn) -> None:
    """The incident that this agent tracked has ended while the agent could not reach etcd, and another one has begun:
    once its record is closed, add the failures of this node's workers to it. No other agent has seen them."""
    incident, node = turn.agent.incidents.followed, turn.policy.node
    over = turn.agent.etcd.view.ended.get(incident.key) if incident is not None else None
    if incident is None or over is None:
        return
    turn.change(followed=None)
    if over.repeat != incident.repeat:
        return
    known = {(cause.generation, cause.node) for cause in over.causes if weight(cause.kind) > 0}
    own = (cause for cause in causes(incident) if cause.node == node and weight(cause.kind) > 0)
    # A generation that has stepped since, and failed then, has done so in another incident.
    if mine := [c for c in own if c.generation < over.generation and (c.generation, node) not in known]:
        every = sorted([*over.causes, *mine], key=lambda c: (c.generation, weight(c.kind) == 0))
        fuller = replace(over, causes=tuple(every[:KEPT_CAUSES]), **named(every))
        fuller = replace(fuller, detail=fuller.detail + begun_anew(over.origin, over.step or 0))
        turn.do(AddCauses(incident.key, fuller))


def conclude(turn: Turn) -> None:
    """Close the record of an incident that is over by what this agent has seen, but which its leader takes to last: its
    own worker was lost before it had stepped, while a rank of this node has. That failure is another incident."""
    over, seen = turn.agent.incidents.closed, turn.agent.etcd.view.incident
    if over is None or seen is None or over.written or not over.recovered or not is_leader(turn.agent):
        return
    if over.false_alarm:
        return  # another failure of its generation continues it
    if over.is_open(seen):
        key, record = seen
        # That leader has put its own worker's failure there, too.
        record = replace(record, causes=tuple(c for c in record.causes if c.generation < over.generation.number))
        over = replace(over, incident=over.incident.with_recorded(key, record), written=True)
        late = turn.agent.incidents.unwritten
        turn.change(closed=over, unwritten=late if late is not None and late.key != key else None)
        told = put(turn, over.incident, over.record()).record  # with its times of day
        ended_wall_s = told.wall_s + max(told.timeline_s.values(), default=0.0)
        turn.do(PutIncident(key, replace(told, ended_wall_s=ended_wall_s)))


def sweep(turn: Turn) -> None:
    """Close a record that is left open though the job steps: an earlier leader is gone, or this agent closed the
    incident while its lease had lapsed, when it did not lead."""
    agent, seen = turn.agent, turn.agent.etcd.view.incident
    if seen is None or agent.formed.generation is None:
        return
    steps = (
        agent.progress.settled >= agent.formed.generation.number > agent.formed.broken
        and not agent.lead.halted
        and turn.steps_advance()
        and agent.peers.dead.isdisjoint((p.node, p.incarnation) for p in agent.formed.generation.nodes)
    )
    # What this agent has just closed may still look open.
    if not steps or turn.now_s - agent.formed.formed_at_s <= SWEEP_S or not is_leader(turn.agent):
        return
    number = agent.formed.generation.number
    if any(c.generation >= number and c.kind not in UNPROVEN and weight(c.kind) for c in seen[1].causes):
        return  # this generation has failed, and this agent has not learnt it: no step follows in it
    over = agent.incidents.closed
    if over is not None and over.is_open(seen):
        told = put(turn, over.incident, over.record()).record  # with its times of day
        record = replace(told, ended_wall_s=told.wall_s + max(told.timeline_s.values()))
    else:
        record = replace(
            seen[1], open=False, timeline_s={"stepping": 0.0}, world_size_after=agent.formed.generation.world_size,
            generation=number,
        )  # fmt: skip
        record = dated(record, turn.now_s, turn.now_s, turn.wall_s)
        if later := min((key for key in agent.etcd.view.repeats if key > seen[0]), default=0):
            record = _ended_before(record, later, agent.etcd.view.ended.get(later))
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
