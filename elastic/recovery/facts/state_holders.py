"""Which nodes hold the live state of the job, as far as the records tell, and which of them the next generation needs
to hand it over. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import BrokenRecord, GenerationNode, GenerationRecord

from .view import Dead, JobView


def all_workers_lost(current: GenerationRecord, node: str, broken: BrokenRecord | None) -> bool:
    """Whether all workers of `node` were lost, so that it holds no live state of the job."""
    if broken is None or broken.generation != current.number or not (lost := broken.lost(node)):
        return False
    return all(set(p.slots) <= lost for p in current.nodes if p.node == node)


def with_witness(
    current: GenerationRecord,
    chosen: list[Member],
    alive: Mapping[str, Member],
    broken: BrokenRecord | None,
    last_committed: GenerationRecord | None = None,
) -> list[Member]:
    """`chosen`; if no node of it holds the job's state, also a node that does: it sends the state before it leaves.

    last_committed: given when `current` has not stepped, so that it may not have distributed the state yet. Then the
    added node is one of `current` that was in `last_committed`, too, or else one that was only in `last_committed`."""
    holders = _holders(current, alive, broken)
    if last_committed is not None:
        seats = {(p.node, p.incarnation) for p in last_committed.nodes}
        now = {p.node: p.incarnation for p in current.nodes}
        kept = [node for node in holders if (node, now[node]) in seats]
        holders = kept or [node for node in _holders(last_committed, alive, None) if node not in now] or holders
    if not holders or not chosen or any(m.record.node in holders for m in chosen):
        return chosen
    return [alive[holders[0]], *chosen]


def with_holders(
    view: JobView,
    current: GenerationRecord,
    chosen: list[Member],
    alive: Mapping[str, Member],
    broken: BrokenRecord | None,
    last_committed: GenerationRecord | None,
    *,
    settled: bool,
) -> list[Member]:
    """`chosen`, and the nodes that have to hand state over after `current` has failed. `alive`: members that the others
    reach. `last_committed`: as for `with_witness`. `settled`: `current` is known to have committed a step."""
    chosen = with_witness(current, chosen, alive, broken, last_committed)
    chosen = _with_leavers(current, chosen, alive, broken, last_committed)
    gone_back = current.restore == "snapshot"  # what is older may be the state that it has gone back from
    # This agent may be new, or have missed a generation that stepped: a node outside has newer state than it knows of.
    known = last_committed.number if last_committed is not None else 0
    unknown = not settled and any(_held(member) > known for member in alive.values())
    if not gone_back and (unknown or _all_state_lost(view, current, alive, broken, last_committed)):
        chosen = _with_older_state(chosen, alive)
    return chosen


def _all_state_lost(
    view: JobView,
    current: GenerationRecord,
    alive: Mapping[str, Member],
    broken: BrokenRecord | None,
    last_committed: GenerationRecord | None,
) -> bool:
    """Whether no worker of `current` is left that has the job's state; if that has not stepped, none of
    `last_committed`: what has joined since may not have received it. A slot of that one may have been lost in any
    generation since."""
    if last_committed is None:
        return not _holders(current, alive, broken)
    lost = {
        (node, slot)
        for report in (*view.broken_before, *((broken,) if broken else ()))
        if report.generation >= last_committed.number
        for node in {report.node, *(loss.node for loss in report.also)}
        for slot in report.lost(node)
    }
    places = [p for p in last_committed.nodes if (m := alive.get(p.node)) and m.record.incarnation == p.incarnation]
    return not any((p.node, slot) not in lost for p in places for slot in p.slots)


def _with_older_state(chosen: list[Member], alive: Mapping[str, Member]) -> list[Member]:
    """`chosen`, and if another node without a place has workers with newer state, of an earlier generation: that with
    the newest. Nodes with a place tell of none, so one too many may be asked.

    It is older than a snapshot mostly is, but newer than the beginning. If it is not consistent, its agent may have a
    snapshot of it, or not: the node with the newest consistent one is added, too."""
    if not chosen:
        return chosen
    asked = list(chosen)
    for held in (_held, _held_consistent):
        newest = max(map(held, asked))
        others = [m for m in alive.values() if held(m) > newest and m.record.ready]
        asked += sorted(others, key=lambda m: (-held(m), m.create_revision))[:1]
    return asked


def _held(member: Member) -> int:
    return member.record.held_generation


def _held_consistent(member: Member) -> int:
    return member.record.held_consistent


def _with_leavers(
    current: GenerationRecord,
    chosen: list[Member],
    alive: Mapping[str, Member],
    broken: BrokenRecord | None,
    last_committed: GenerationRecord | None,
) -> list[Member]:
    """`chosen`, and the nodes that hold the job's state but are draining, newly excluded or beyond the job's new
    maximum: any of them may be the only one that committed the last step. They leave after the next generation has
    stepped."""
    there = {m.record.node for m in chosen}
    holders = _holders(current, alive, broken)
    if last_committed is not None:
        holders += [node for node in _holders(last_committed, alive, None) if current.at(node) is None]
    late = [alive[node] for node in dict.fromkeys(holders) if node not in there]
    planned = current.at_step is not None  # it left out nodes that were well
    asked = (m for m in late if planned or m.record.draining is not None or current.at(m.record.node) is not None)
    return [*chosen, *asked]


def _holders(formed: GenerationRecord, alive: Mapping[str, Member], broken: BrokenRecord | None) -> list[str]:
    """Nodes of `formed` on which at least one of its workers is alive, as far as is known."""

    def holds(place: GenerationNode) -> bool:
        member = alive.get(place.node)
        lost = broken.lost(place.node) if broken else ()
        return (
            member is not None
            and member.record.incarnation == place.incarnation
            and any(s in member.record.ready and s not in lost for s in place.slots)
        )

    return [p.node for p in formed.nodes if holds(p)]


def absent_before(
    current: GenerationRecord, last_committed: GenerationRecord | None, alive: Mapping[str, Member], dead: Dead
) -> list[str]:
    """Nodes of `last_committed` without a place in `current` that are absent and not proven dead. Each may be the only
    one that has the newest state: a rank of `current` that has received only a part of it has none."""
    places = [p for p in last_committed.nodes if current.at(p.node) is None] if last_committed is not None else []
    return [p.node for p in places if p.node not in alive and (p.node, p.incarnation) not in dead]
