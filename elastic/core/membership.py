"""Who leads, who is in the next generation, and in which order. Pure functions over one picture of the job."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .keys import JobKeys
from .records import (
    BrokenRecord,
    GenerationRecord,
    JobState,
    MemberRecord,
    Place,
    ProgressRecord,
    SpecRecord,
    decode,
)


class Stored(Protocol):
    """One key as etcd returns it."""

    @property
    def value(self) -> bytes: ...
    @property
    def create_revision(self) -> int: ...
    @property
    def mod_revision(self) -> int: ...


# A view comes whole, with thousands of members in a large job, and next to nothing in it has changed.


@functools.lru_cache(maxsize=16384)
def _member(raw: bytes) -> MemberRecord:
    return decode(MemberRecord, raw)


@functools.lru_cache(maxsize=16)
def _generation(raw: bytes) -> GenerationRecord:
    return decode(GenerationRecord, raw)


@dataclass(frozen=True, slots=True)
class Member:
    record: MemberRecord
    seniority: int
    """Create revision of its key: the smallest is the oldest."""

    @property
    def id(self) -> tuple[str, str]:
        return self.record.node, self.record.incarnation


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything etcd says of one job, at one revision."""

    spec: SpecRecord | None = None
    state: JobState = field(default_factory=JobState)
    state_revision: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    generation: GenerationRecord | None = None
    generation_revision: int = 0
    saved_step: int = 0
    """The newest checkpoint that the leader has told of."""
    broken: BrokenRecord | None = None
    """The record of `generation`'s failure, if it has one."""
    revision: int = 0

    @staticmethod
    def read(keys: JobKeys, kvs: Mapping[str, Stored], revision: int) -> JobView:
        """Raises SpeaksAnotherProtocol for a record of another version."""

        def find(key: str) -> Stored | None:
            return kvs.get(key)

        spec, state, generation = find(keys.spec), find(keys.state), find(keys.generation)
        progress = find(keys.progress)
        members = {
            key.removeprefix(keys.members): Member(_member(kv.value), kv.create_revision)
            for key, kv in kvs.items()
            if key.startswith(keys.members)
        }
        formed = _generation(generation.value) if generation else None
        broken = find(keys.broken(formed.number)) if formed else None
        return JobView(
            spec=decode(SpecRecord, spec.value) if spec else None,
            state=decode(JobState, state.value) if state else JobState(),
            state_revision=state.mod_revision if state else 0,
            members=members,
            generation=formed,
            generation_revision=generation.mod_revision if generation else 0,
            broken=decode(BrokenRecord, broken.value) if broken else None,
            revision=revision,
            saved_step=(decode(ProgressRecord, progress.value).checkpoint_step or 0) if progress else 0,
        )


Dead = frozenset[tuple[str, str]]
"""(node, incarnation) of agents proven dead, whatever their leases say."""


def living(view: JobView, dead: Dead) -> dict[str, Member]:
    return {node: m for node, m in view.members.items() if m.id not in dead}


def leader(view: JobView, dead: Dead, current: GenerationRecord | None) -> str | None:
    """The living member of the current generation with the lowest node rank that is to stay; without one, one that
    is about to leave; without one, the oldest member.

    So the leader's own workers tell it how the job is doing, and the next generation's store outlives the change.
    Two agents may think themselves the leader for a moment; the compare-and-swap on the generation lets one of them
    win.
    """
    leaves = None
    for place in current.places if current else ():
        member = view.members.get(place.node)
        if member and member.id not in dead and member.record.incarnation == place.incarnation:
            if member.record.draining is None and place.node not in view.state.avoid:
                return place.node
            leaves = leaves or place.node
    if leaves is not None:
        return leaves
    alive = living(view, dead)
    return min(alive.values(), key=lambda m: m.seniority).record.node if alive else None


@dataclass(frozen=True, slots=True)
class Limits:
    min_nodes: int
    max_nodes: int
    join_wait_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """No new generation now."""

    reason: str
    below_min: bool = False
    fine: bool = False
    """Nothing is waited for: all is as it should be."""


@dataclass(frozen=True, slots=True)
class Change:
    """Publish a generation with these places."""

    places: tuple[Place, ...]
    why: str
    planned: bool
    """True: the present generation steps on to a boundary. False: it is broken or gone; let go at once."""
    restore: str = "newest"


def next_generation(
    view: JobView,
    current: GenerationRecord | None,
    limits: Limits,
    dead: Dead,
    *,
    steps_advance: bool,
    settled: bool,
    min_reached_for_s: float,
    blind: bool = False,
    in_place: bool = True,
) -> Change | Wait:
    """What should follow `current`.

    steps_advance: the leader's own workers commit steps, so every rank of `current` lives, whatever leases say.
    settled: `current` has committed a step here, so that a planned change may follow.
    min_reached_for_s: how long enough members have been there (first forming only).
    in_place: workers survive a re-formation; without it they are started anew, and their steps are not known.
    blind: etcd was away; who is absent may be about to come back.
    """
    alive = living(view, dead)
    fit = [
        m
        for m in alive.values()
        if m.record.ready and m.record.draining is None and m.record.node not in view.state.avoid
    ]
    if current is None:
        return _first(fit, limits, min_reached_for_s)

    missing = _missing(current, alive, dead, steps_advance or blind)
    if not (settled or blind) and _store_lost(view, current, alive):
        missing.append(current.leader)
    broken = view.broken if view.broken and view.broken.generation == current.number else None
    absent = [p.node for p in current.places if p.node not in alive and p.node not in missing]
    missing += [node for node in absent if not blind and bereft(current, node, broken)]
    absent = [node for node in absent if node not in missing]
    chosen = _choose(current, fit, limits.max_nodes)
    if broken or missing:
        if absent and blind:
            return Wait(f"etcd was away: {', '.join(absent)} may not have come back yet")
        chosen = _with_witness(current, chosen, alive, broken)
        why = _why(broken, missing)
        if len(chosen) < limits.min_nodes:
            return Wait(f"{why}; {len(chosen)} of at least {limits.min_nodes} nodes are there", below_min=True)
        lost = {(broken.node, slot) for slot in broken.slots} if broken else set()
        # A roll-back that was itself cut short is not over: what is live may still be what it went back from.
        rollback = (broken and broken.rollback) or (current.restore == "snapshot" and not settled)
        restore = "snapshot" if rollback else "newest"
        return Change(arrange(current, chosen, lost), why, planned=False, restore=restore)

    if absent:
        return Wait(f"{', '.join(absent)} cannot be heard of, {'and lives: steps advance' if steps_advance else 'yet'}")
    chosen = _with_witness(current, chosen, alive, None)
    places = arrange(current, chosen, set())
    if _same(places, current.places):
        return Wait("as it should be", fine=True)
    if not settled:
        return Wait("a planned change waits until this generation has stepped")
    if len(chosen) < limits.min_nodes:
        return Wait(f"leaving now would leave {len(chosen)} of at least {limits.min_nodes} nodes", below_min=True)
    if in_place and not steps_advance:
        return Wait("a planned change waits for steps to advance")
    return Change(places, _difference(current, places, alive), planned=True)


def _first(fit: list[Member], limits: Limits, min_reached_for_s: float) -> Change | Wait:
    if len(fit) < limits.min_nodes:
        return Wait(f"{len(fit)} of at least {limits.min_nodes} nodes are ready", below_min=True)
    if len(fit) < limits.max_nodes and min_reached_for_s < limits.join_wait_s:
        return Wait(f"{len(fit)} of at most {limits.max_nodes} nodes are ready; a moment for more")
    return Change(arrange(None, _choose(None, fit, limits.max_nodes), set()), "first forming", planned=False)


def _missing(current: GenerationRecord, alive: Mapping[str, Member], dead: Dead, steps_advance: bool) -> list[str]:
    """Nodes of `current` that are gone. An expired lease alone proves nothing while steps advance (G4)."""
    gone = []
    for place in current.places:
        member = alive.get(place.node)
        # A restarted or proven dead agent has lost its workers: certain, even while the last steps still trickle in.
        proven = (place.node, place.incarnation) in dead
        restarted = member is not None and member.record.incarnation != place.incarnation
        if proven or restarted or (member is None and not steps_advance):
            gone.append(place.node)
    return gone


def _store_lost(view: JobView, current: GenerationRecord, alive: Mapping[str, Member]) -> bool:
    """Its host takes no part, and is gone or another since: nobody can form `current` any more."""
    if any(place.node == current.leader for place in current.places):
        return False
    host = alive.get(current.leader)
    return host is None or host.seniority > view.generation_revision


def _choose(current: GenerationRecord | None, fit: list[Member], max_nodes: int) -> list[Member]:
    """At most `max_nodes`: those of the present generation first, then by age."""
    rank = {(p.node, p.incarnation): i for i, p in enumerate(current.places)} if current else {}
    return sorted(fit, key=lambda m: (m.id not in rank, rank.get(m.id, 0), m.seniority))[:max_nodes]


def bereft(current: GenerationRecord, node: str, broken: BrokenRecord | None) -> bool:
    """All workers of `node` were lost: nothing of the job's state is to be had there."""
    if broken is None or broken.generation != current.number or broken.node != node:
        return False
    return all(set(p.slots) <= set(broken.slots) for p in current.places if p.node == node)


def _with_witness(
    current: GenerationRecord, chosen: list[Member], alive: Mapping[str, Member], broken: BrokenRecord | None
) -> list[Member]:
    """`chosen`, and if none of them holds the job's state, one who does: it hands it over before it leaves."""

    def holds(place: Place) -> bool:
        member = alive.get(place.node)
        lost = broken.slots if broken and broken.node == place.node else ()
        return (
            member is not None
            and member.record.incarnation == place.incarnation
            and any(s in member.record.ready and s not in lost for s in place.slots)
        )

    holders = [p.node for p in current.places if holds(p)]
    if not holders or not chosen or any(m.record.node in holders for m in chosen):
        return chosen
    return [alive[holders[0]], *chosen]


def arrange(current: GenerationRecord | None, chosen: list[Member], lost: set[tuple[str, int]]) -> tuple[Place, ...]:
    """Places in rank order: survivors first, so that rank 0 holds live state whenever anyone does.

    Among survivors, and among newcomers, the order stays as it was.
    """
    before = {(p.node, p.incarnation): p for p in current.places} if current else {}

    def place(member: Member) -> tuple[bool, Place]:
        record = member.record
        old = before.get(member.id)
        known = [s for s in old.slots if s in record.ready] if old else []
        survivors = [s for s in known if (record.node, s) not in lost]
        newcomers = [s for s in known if s not in survivors] + sorted(set(record.ready) - set(known))
        slots = tuple(survivors + newcomers)
        return not survivors, Place(node=record.node, incarnation=record.incarnation, host=record.host, slots=slots)

    placed = [place(m) for m in chosen]
    return tuple(p for _, p in sorted(placed, key=lambda pair: pair[0]))  # stable: keeps the order within each half


def _same(a: tuple[Place, ...], b: tuple[Place, ...]) -> bool:
    return a == b


def _why(broken: BrokenRecord | None, missing: list[str]) -> str:
    parts = [f"{broken.kind} on {broken.node}: {broken.detail}"] if broken else []
    return "; ".join(parts + [f"node {node} is gone" for node in missing])


def _difference(current: GenerationRecord, places: tuple[Place, ...], alive: Mapping[str, Member]) -> str:
    before, after = {p.node: p for p in current.places}, {p.node: p for p in places}
    said = []
    for node in sorted(before.keys() - after.keys()):
        reason = alive[node].record.draining if node in alive else None
        said.append(f"{node} leaves ({reason})" if reason else f"{node} leaves")
    said += [f"{node} joins" for node in sorted(after.keys() - before.keys())]
    said += [
        f"{n} changes its workers" for n in sorted(before.keys() & after.keys()) if before[n].slots != after[n].slots
    ]
    return ", ".join(said) or "new order"
