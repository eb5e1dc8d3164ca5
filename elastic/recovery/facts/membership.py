"""Leader election, and the membership and rank order of the next generation. Pure functions of one view of the job."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import BrokenRecord, GenerationNode, GenerationRecord
from elastic.contract.records.reasons import Code, Reason, Text, listed, reason
from elastic.contract.structs import replace

from . import reachability
from .state_holders import absent_before, all_workers_lost, with_holders, with_witness
from .view import Dead, JobView

_seniority = operator.attrgetter("create_revision")

LEADER_CANDIDATES = 8
"""How many members of a generation, in the order of `by_preference`, are leader candidates."""


def living(view: JobView, dead: Dead) -> dict[str, Member]:
    return {node: m for node, m in view.members.items() if m.id not in dead}


def cut_off(view: JobView, dead: Dead, current: GenerationRecord | None) -> frozenset[str]:
    """Living members that the job goes on without: other members cannot reach them, or they cannot reach others."""
    if not view.disputes:
        return frozenset()
    alive = living(view, dead)
    there = frozenset((a, b) for a, b in view.disputes if a in alive and b in alive)
    seats = {(p.node, p.incarnation) for p in current.nodes} if current else set()
    nodes = {node for pair in there for node in pair}
    seated = frozenset(node for node in nodes if alive[node].id in seats)

    def worth(node: str) -> tuple[bool, bool, bool, int]:
        leaves = alive[node].record.draining is not None or node in view.state.excluded_nodes
        empty = current is not None and all_workers_lost(current, node, view.broken)
        # Sorts the nodes most worth keeping first: of two with equally many disputes, the later one is left out.
        return node not in seated, empty, leaves, alive[node].create_revision

    return reachability.left_out(there, tuple(sorted(nodes, key=worth)), seated)


def other_script(members: Mapping[str, Member], current: GenerationRecord | None) -> dict[str, str]:
    """Nodes that have no place in `current` and run another script than the job does -> a node that runs the job's: one
    with a place, else the oldest. Workers of both in one group would train two programs."""
    seated = [members[p.node] for p in current.nodes if p.node in members] if current else []
    seated = [m for m in seated if current and current.node_of(*m.id) is not None]
    scripted = [m for m in [*seated, *sorted(members.values(), key=_seniority)] if m.record.code]
    if not scripted:
        return {}
    others = {m.record.node: scripted[0].record.node for m in scripted if m.record.code != scripted[0].record.code}
    return {node: right for node, right in others.items() if all(m.record.node != node for m in seated)}


def unreached(view: JobView, node: str) -> Reason:
    """'node2 cannot be reached by node0, node1'."""
    others = sorted({other for pair in view.disputes if node in pair for other in pair} - {node})
    if len(others) == 1 and sum(others[0] in pair for pair in view.disputes) == 1:  # which of the two is at fault?
        return reason(Code.UNREACHED_PAIR, node=node, other=others[0])
    more = " and others" if len(others) > 5 else ""
    return reason(Code.UNREACHED, node=node, others=f"{', '.join(others[:5])}{more}")


def watch_list(
    view: JobView,
    dead: Dead,
    current: GenerationRecord | None,
    me: str,
    complaints: Collection[str] = (),
    leader_candidates: int = LEADER_CANDIDATES,
) -> list[Member]:
    """Members that the agent of node `me` keeps a connection to.

    The leader connects to all members, and all members to the leader, with or without a place in the generation. In a
    job of at most `reachability.MESH` members, every agent connects to every other. In a larger one, an agent connects
    to its neighbours in the ring of nodes, and to the nodes in `complaints` until they answer. That takes no pass over
    all members: thousands of agents evaluate this at the same time.
    """
    members = view.members
    chief = leader(view, dead, current, leader_candidates)
    wanted: Collection[str] = members
    if me != chief and len(members) > reachability.MESH:
        at = current.at(me) if current else None
        near = reachability.neighbours(at, len(current.nodes)) if current and at is not None else ()
        ring = {current.nodes[i].node for i in near} if current else set()
        wanted = ring | ({chief} if chief else set()) | set(complaints)
    watched = [members[node] for node in wanted if node != me and node in members]
    return [m for m in watched if m.id not in dead]


def by_preference(current: GenerationRecord) -> Iterable[GenerationNode]:
    """The nodes of `current` in the order in which they are to lead: by node rank, newcomers last. A newcomer may have
    the place of a lost node, the lowest perhaps; its agent has seen neither that failure nor a step."""
    if not (new := set(current.newcomers)):
        return current.nodes
    return sorted(current.nodes, key=lambda place: place.node in new)


def leader(
    view: JobView, dead: Dead, current: GenerationRecord | None, leader_candidates: int = LEADER_CANDIDATES
) -> str | None:
    """The leader's node; None without a living member.

    In order of preference: the first leader candidate that stays (see `by_preference`); one that is about to leave;
    the oldest member. Candidates are the first `leader_candidates` living members of the current generation, since not
    all agents beyond them watch the members (see `watch_scope`). A partitioned node never leads: its store would be
    unreachable.

    So the leader's own workers show it the job's progress, and the store of the next generation, which the leader
    hosts, outlives the change. Two agents may take themselves for the leader for a moment; the compare-and-swap on the
    generation record lets one of them win.
    """
    cut = cut_off(view, dead, current)
    leaves, seen = None, 0
    for place in by_preference(current) if current else ():
        member = view.members.get(place.node)
        if member and member.id not in dead and member.record.incarnation == place.incarnation:
            if place.node in cut:
                continue
            if member.record.draining is None and place.node not in view.state.excluded_nodes:
                return place.node
            leaves, seen = leaves or place.node, seen + 1
            if seen == leader_candidates:
                break
    if leaves is not None:
        return leaves
    alive: Collection[Member] = view.members.values()
    if dead or cut:
        alive = [m for m in alive if m.id not in dead and m.record.node not in cut]
    return min(alive, key=_seniority).record.node if alive else None


class NodeLimits(msgspec.Struct, frozen=True):
    min_nodes: int
    max_nodes: int
    join_wait_s: float


class Wait(msgspec.Struct, frozen=True):
    """No new generation is formed now."""

    reason: Text
    below_min: bool = False
    steady: bool = False
    """Nothing is waited for: the current generation needs no change."""


NO_CHANGE = Wait(reason(Code.UNCHANGED), steady=True)


class Change(msgspec.Struct, frozen=True):
    """Publish a generation with these nodes."""

    nodes: tuple[GenerationNode, ...]
    why: Text
    planned: bool
    """True: the current generation runs on to a step boundary. False: it is broken or gone; its group is aborted."""
    restore: str = "newest"
    newcomers: tuple[str, ...] = ()
    """As in the generation's record."""


@dataclass(frozen=True)
class Situation:
    """What the leader decides from, and what follows from that for the nodes of the next generation."""

    view: JobView
    current: GenerationRecord | None
    limits: NodeLimits
    dead: Dead
    _: dataclasses.KW_ONLY
    steps_advance: bool
    """The leader's own workers commit steps, so every rank of `current` is alive, whatever the leases say."""
    settled: bool
    """`current` has committed a step here, so that a planned change may follow."""
    min_reached_for_s: float
    """For how long enough members have been ready (first generation only)."""
    blind: bool = False
    """etcd was unavailable; absent members may be about to come back."""
    in_place: bool = True
    """Workers survive a re-formation; otherwise they are started anew, and their steps are not known."""
    last_committed: GenerationRecord | None = None
    """The newest generation before `current` that has committed a step, if it is known."""

    @cached_property
    def alive(self) -> dict[str, Member]:
        return living(self.view, self.dead)

    @cached_property
    def other(self) -> dict[str, str]:
        return other_script(self.alive, self.current)

    @cached_property
    def cut(self) -> frozenset[str]:
        """Living nodes that the job goes on without."""
        return cut_off(self.view, self.dead, self.current) | self.other.keys()

    @cached_property
    def held(self) -> GenerationRecord:
        assert self.current is not None  # the rules of a first generation come first
        return self.current

    @cached_property
    def broken(self) -> BrokenRecord | None:
        return self.view.broken if self.view.broken and self.view.broken.generation == self.held.number else None

    @cached_property
    def missing(self) -> list[str]:
        """Nodes that are lost to `current`: it cannot go on."""
        missing = _missing(self.held, self.alive, self.dead, self.steps_advance or self.blind)
        if not self.steps_advance:
            missing += [p.node for p in self.held.nodes if p.node in self.cut and p.node not in missing]
        # Until `current` has stepped, its ranks may still need the store in order to form.
        if not (self.settled or self.blind) and _store_lost(self.view, self.held, self.alive, self.cut):
            missing.append(self.held.leader)
        # An absent node whose workers are all lost cannot be the one that keeps stepping.
        absent = [p.node for p in self.held.nodes if p.node not in self.alive and p.node not in missing]
        return missing + [n for n in absent if not self.blind and all_workers_lost(self.held, n, self.broken)]

    @cached_property
    def absent(self) -> list[str]:
        """Nodes of `current` that are not heard of, and may live."""
        return [p.node for p in self.held.nodes if p.node not in self.alive and p.node not in self.missing]

    @cached_property
    def failed(self) -> bool:
        return self.current is not None and bool(self.broken or self.missing)

    @cached_property
    def older(self) -> GenerationRecord | None:
        """The generation whose nodes may have newer state than those of `current`."""
        return None if self.settled else self.last_committed

    @cached_property
    def reached(self) -> dict[str, Member]:
        return {node: m for node, m in self.alive.items() if node not in self.cut}

    @cached_property
    def awaited(self) -> list[str]:
        """Nodes whose return is waited for after a failure, since absence proves nothing yet."""
        if not (self.failed and self.blind):
            return []
        return self.absent or absent_before(self.held, self.older, self.reached, self.dead)

    @cached_property
    def chosen(self) -> list[Member]:
        """The members of the next generation."""
        if self.current is None or self.failed:
            inside = [m for m in _fit(self.alive.values(), self.view, self.limits) if m.record.node not in self.cut]
            if self.current is None:
                return inside
            chosen = _choose(self.current, inside, self.limits.max_nodes)
            return with_holders(
                self.view, self.current, chosen, self.reached, self.broken, self.older, settled=self.settled
            )
        alive = [_as_seated(self.current, m) if self.steps_advance else m for m in self.alive.values()]
        # While steps advance, the data path between seated nodes works, even if their agents cannot reach each other.
        seated = {p.node for p in self.current.nodes}
        fit = [m for m in _fit(alive, self.view, self.limits) if m.record.node not in self.cut - seated]
        return with_witness(self.current, _choose(self.current, fit, self.limits.max_nodes), self.alive, None)

    @cached_property
    def places(self) -> tuple[GenerationNode, ...]:
        return arrange(self.current, self.chosen)

    @cached_property
    def too_few(self) -> bool:
        return len(self.chosen) < self.limits.min_nodes

    @property
    def cut_reasons(self) -> list[Reason]:
        """Why living nodes are left out."""
        unreachable = [unreached(self.view, node) for node in sorted(self.cut) if node not in self.other]
        others = sorted(self.other.items())
        return unreachable + [reason(Code.OTHER_SCRIPT, node=node, other=right) for node, right in others]

    def count(self, code: Code) -> Reason:
        """`code`, with how many members are chosen and how many are needed."""
        return reason(code, count=len(self.chosen), least=self.limits.min_nodes)


class Rule(NamedTuple):
    condition: str
    answer: str
    """Both for `docs/states.md`."""
    holds: Callable[[Situation], object]
    decide: Callable[[Situation], Change | Wait]


def next_generation(situation: Situation) -> Change | Wait:
    """What follows the current generation: a new one, or none yet."""
    return next(rule.decide(situation) for rule in RULES if rule.holds(situation))


def _fit(members: Iterable[Member], view: JobView, limits: NodeLimits) -> list[Member]:
    fit = [m for m in members if m.record.ready and m.record.draining is None]
    preferred = [m for m in fit if m.record.node not in view.state.excluded_nodes]
    return preferred if len(preferred) >= limits.min_nodes else fit  # an excluded node is better than none


def _as_seated(current: GenerationRecord, member: Member) -> Member:
    """`member` with the slots that it has in `current`, if its record says that none is ready: `current` steps, so the
    record is from before, and etcd slow."""
    seat = None if member.record.ready else current.node_of(*member.id)
    return member if seat is None else replace(member, record=replace(member.record, ready=seat.slots))


def _newcomers(current: GenerationRecord, places: tuple[GenerationNode, ...], settled: bool) -> tuple[str, ...]:
    """Those that have joined since the last generation that has stepped, as far as is known."""
    unproven = () if settled else current.newcomers
    return tuple(p.node for p in places if p.node in unproven or current.node_of(p.node, p.incarnation) is None)


def _too_few_to_begin(s: Situation) -> Wait:
    return Wait(listed(s.count(Code.TOO_FEW), *s.cut_reasons), below_min=True)


def _first(s: Situation) -> Change:
    return Change(arrange(None, _choose(None, s.chosen, s.limits.max_nodes)), reason(Code.FIRST), planned=False)


def _after_a_failure(s: Situation) -> Change | Wait:
    why = _why(s.view, s.broken, s.missing, s.cut)
    if s.too_few:
        return Wait(listed(*why, s.count(Code.TOO_FEW)), below_min=True)
    # A rollback that was itself interrupted is not complete: live state may still be the state that was discarded.
    rollback = (s.broken and s.broken.rollback) or (s.held.restore == "snapshot" and not s.settled)
    restore, new = "snapshot" if rollback else "newest", _newcomers(s.held, s.places, s.settled)
    return Change(s.places, listed(*why), planned=False, restore=restore, newcomers=new)


def _unheard(s: Situation) -> Wait:
    return Wait(reason(Code.UNHEARD, nodes=", ".join(s.absent)))


def _planned(s: Situation) -> Change:
    why, new = _difference(s.held, s.places, s.alive, s.limits), _newcomers(s.held, s.places, s.settled)
    return Change(s.places, why, planned=True, newcomers=new)


RULES = (
    Rule("no generation yet, fewer nodes are ready than the minimum", "wait",
         lambda s: s.current is None and s.too_few, _too_few_to_begin),
    Rule("no generation yet, fewer than the maximum, and `join_wait_s` has not passed", "wait for more",
         lambda s: s.current is None and len(s.chosen) < s.limits.max_nodes
         and s.min_reached_for_s < s.limits.join_wait_s,
         lambda s: Wait(reason(Code.MORE_MAY_COME, count=len(s.chosen), most=s.limits.max_nodes))),
    Rule("no generation yet", "form the first", lambda s: s.current is None, _first),
    Rule("it failed or lost a node, etcd was away, and a node that may have the state has not come back",
         "wait for it", lambda s: s.awaited,
         lambda s: Wait(reason(Code.ETCD_WAS_AWAY, nodes=", ".join(s.awaited)))),
    Rule("it failed or lost a node, and fewer nodes are left than the minimum", "wait",
         lambda s: s.failed and s.too_few, _after_a_failure),
    Rule("it failed or lost a node", "form the next without what is lost", lambda s: s.failed, _after_a_failure),
    Rule("a node of it is not heard of, and not known to be lost", "wait for it", lambda s: s.absent, _unheard),
    Rule("the next would have the same nodes and slots", "no change", lambda s: s.places == s.held.nodes,
         lambda s: Wait(listed(*s.cut_reasons)) if s.cut else NO_CHANGE),
    Rule("it has not stepped yet", "wait for a step", lambda s: not s.settled,
         lambda s: Wait(reason(Code.NOT_STEPPED))),
    Rule("the next would have fewer nodes than the minimum", "wait", lambda s: s.too_few,
         lambda s: Wait(s.count(Code.TOO_FEW_STAY), below_min=True)),
    Rule("no step is made, and workers survive a change", "wait for steps",
         lambda s: s.in_place and not s.steps_advance, lambda s: Wait(reason(Code.STANDS_STILL))),
    Rule("none of these", "form the next at a step boundary", lambda s: True, _planned),
)  # fmt: skip
"""In order: the first rule that holds decides. Drawn into `docs/states.md`."""


def _missing(current: GenerationRecord, alive: Mapping[str, Member], dead: Dead, steps_advance: bool) -> list[str]:
    """Nodes of `current` that are gone. An expired lease alone proves nothing while steps advance (G4)."""
    gone = []
    for place in current.nodes:
        member = alive.get(place.node)
        # A restarted or proven dead agent has lost its workers, even if their last steps are still being reported.
        proven = (place.node, place.incarnation) in dead
        restarted = member is not None and member.record.incarnation != place.incarnation
        if proven or restarted or (member is None and not steps_advance):
            gone.append(place.node)
    return gone


def _store_lost(view: JobView, current: GenerationRecord, alive: Mapping[str, Member], cut: Collection[str]) -> bool:
    """Whether the host of `current`'s store has no place in it, and is gone, unreachable or registered anew since: then
    no rank can form `current` any more. (A host with a place in it counts as a missing node when it is lost.)"""
    if any(place.node == current.leader for place in current.nodes):
        return False
    host = alive.get(current.leader)
    return host is None or current.leader in cut or host.create_revision > view.generation_revision


def _choose(current: GenerationRecord | None, fit: list[Member], max_nodes: int) -> list[Member]:
    """At most `max_nodes` members: those of the current generation in rank order, then the others, oldest first."""
    rank = {(p.node, p.incarnation): i for i, p in enumerate(current.nodes)} if current else {}
    return sorted(fit, key=lambda m: (m.id not in rank, rank.get(m.id, 0), m.create_revision))[:max_nodes]


def arrange(current: GenerationRecord | None, chosen: list[Member]) -> tuple[GenerationNode, ...]:
    """The nodes in rank order: each keeps its place in `current`, and each worker its own among those of its node.

    So no rank of an unchanged world has another number afterwards: scripts read RANK once. A newcomer takes the place
    of a lost node that had as many workers, the others come last, in the order of `chosen`; places that stay empty are
    closed up.
    """
    before = current.nodes if current else ()
    left, order = {m.record.node: m for m in chosen}, list[GenerationNode]()
    kept = [left.pop(p.node, None) for p in before]
    for old, member in zip(before, kept, strict=True):
        if member is None:
            member = next((m for m in left.values() if len(m.record.ready) == len(old.slots)), None)
            if member is None:
                continue
            del left[member.record.node]
        order.append(_place(member, old.slots if old.node == member.record.node else ()))
    return (*order, *(_place(member, ()) for member in left.values()))


def _place(member: Member, before: tuple[int, ...]) -> GenerationNode:
    """`before`: the slots of its node in rank order, until now."""
    record = member.record
    new = iter(sorted(set(record.ready).difference(before)))
    slots = [slot if slot in record.ready else next(new, None) for slot in before]
    return GenerationNode(
        node=record.node,
        incarnation=record.incarnation,
        host=record.host,
        slots=(*(slot for slot in slots if slot is not None), *new),
        port=record.port,
    )


def _why(view: JobView, broken: BrokenRecord | None, missing: list[str], cut: Collection[str]) -> list[Reason]:
    report = [reason(Code.BROKE, broken.detail, kind=broken.kind, node=broken.node)] if broken else []
    silent = {node for pair in view.disputes for node in pair if node in cut}
    return report + [unreached(view, n) if n in silent else reason(Code.NODE_GONE, node=n) for n in missing]


def _difference(
    current: GenerationRecord, places: tuple[GenerationNode, ...], alive: Mapping[str, Member], limits: NodeLimits
) -> Text:
    before, after = {p.node: p for p in current.nodes}, {p.node: p for p in places}
    scaled: Text = ""  # as the daemon says, whose order to leave may come later than the job's new limits
    if len(before) > limits.max_nodes:
        scaled = reason(Code.SURPLUS, nodes=f"{limits.min_nodes}:{limits.max_nodes}")
    changes = []
    for node in sorted(before.keys() - after.keys()):
        why = (alive[node].record.draining if node in alive else None) or scaled
        changes.append(reason(Code.LEAVES, why, node=node))
    changes += [reason(Code.JOINS, node=node) for node in sorted(after.keys() - before.keys())]
    both = sorted(before.keys() & after.keys())
    changes += [reason(Code.SLOTS_CHANGE, node=n) for n in both if before[n].slots != after[n].slots]
    return listed(*changes) or reason(Code.REORDERED)
