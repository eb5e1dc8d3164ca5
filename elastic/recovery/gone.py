"""Which nodes of a generation that is over are lost or unreachable. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from elastic.contract.records.job_records import Cause, GenerationNode, GenerationRecord

from .incident import Incident
from .membership import cut_off, unreached
from .turn import Turn


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
