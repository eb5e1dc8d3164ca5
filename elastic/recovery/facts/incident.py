"""One outage or planned change, as far as an agent has learnt of it, and the record made from that. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from elastic.contract.origin import Origin
from elastic.contract.records.job_records import (
    BrokenRecord,
    Cause,
    GenerationNode,
    GenerationRecord,
    IncidentRecord,
    Loss,
)
from elastic.contract.records.reasons import Text
from elastic.contract.structs import replace

from .evidence import kind_of, merged, spread, weight

KEPT_CAUSES = 400
"""How many causes of an incident its record lists, the first ones: etcd accepts 1.5 MiB per request, and a record that
it refuses would be retried forever and never be closed. `detail` counts all."""

KEPT_REPEATS = 20
"""How many further incidents of one generation have records of their own, while it steps on after each. Those after
them share one record, that of the newest."""

UNPROVEN = ("lost", "unreachable")
"""Causes that another agent has inferred: the node may live, and its ranks step."""

ENDS = ("exit", "respawn")
"""Kinds of reports that are made when the process has ended: its last step is known then."""


class Sync(msgspec.Struct, frozen=True):
    """The state that one generation of the recovery resumed from."""

    generation: int
    resumed: int
    """The step it resumed from."""
    reached: int
    """The newest step that was committed before, as far as is known."""
    origin: Origin
    source: str
    older: bool = False
    """Live state of a generation before that of the newest commit that is known: of a node that has come back."""


class Incident(msgspec.Struct, frozen=True):
    """An incident that is not over."""

    key: int
    """Number of the generation after the one that failed first: the record's number in etcd."""
    generations: tuple[GenerationRecord, ...]
    """The generation that failed or is replaced as planned, and those that followed it during the recovery."""
    began_s: float
    noticed_wall_s: float = 0.0
    """This node's time of day at `began_s`: a clock that is set later changes no time of the record."""
    repeat: int = 0
    """As in its record: its place among the incidents of this key."""
    planned: bool = False
    began_wall_s: float = 0.0
    """Set if it began before this agent did, or has been recorded by an earlier leader: by that node's clock."""
    stepped_s: float = float("-inf")
    """Monotonic instant at which this agent last saw a step: it did not begin before. -inf: it has seen none."""
    left_wall_s: float = 0.0
    """The same by this node's time of day, if the previous agent of this node was there when it began; 0: unknown."""
    why: Text = ""
    reached: int = 0
    """The newest step known to have been committed when it began."""
    reached_before: bool = False
    """`reached` is all that a new agent found, and of a generation before the one that failed: that may have begun from
    earlier state."""
    inherited: tuple[Cause, ...] = ()
    """From the record of an earlier leader."""
    reports: tuple[BrokenRecord, ...] = ()
    """Of the generations that broke, oldest first."""
    gone: tuple[Cause, ...] = ()
    """Nodes that were lost or unreachable."""
    gone_s: tuple[tuple[str, float], ...] = ()
    """(node, monotonic instant at which this agent learnt it) of those whose member key was still there."""
    syncs: tuple[Sync, ...] = ()
    left: tuple[int, ...] = ()
    """Generations that a rank of this node has left between two steps, in ascending order: no rank has committed a step
    that this one has not."""
    timeline_s: tuple[tuple[str, float], ...] = ()
    told: tuple[Cause, ...] | None = None
    """The causes in the record as this agent wrote it last; None: it has not."""

    @property
    def first(self) -> int:
        """Number of the generation that failed first, also if only an earlier leader has seen that."""
        return min(self.generations[0].number, self.key - 1)

    def with_report(self, report: BrokenRecord) -> Incident:
        """With `report` merged into what is known of its generation: etcd may not show yet what was just reported."""
        if report in self.reports or report.generation < self.first:
            return self
        known = next((r for r in self.reports if r.generation == report.generation), None)
        if known is not None and (report := merged(report, known)) == known:
            return self
        others = [r for r in self.reports if r is not known]
        return replace(self, reports=tuple(sorted([*others, report], key=lambda known: known.generation)))

    def with_left(self, generations: Iterable[int]) -> Incident:
        """With these in `left`."""
        more = {number for number in generations if number >= self.first}.difference(self.left)
        return replace(self, left=tuple(sorted([*self.left, *more]))) if more else self

    def since(self, generations: tuple[GenerationRecord, ...], key: int) -> Incident:
        """The incident `key` that follows this one, which is over: with what belongs to `generations`."""
        return Incident(
            key=key,
            generations=generations,
            began_s=self.began_s,
            noticed_wall_s=self.noticed_wall_s,
            stepped_s=self.stepped_s,
            left_wall_s=self.left_wall_s,
            reports=tuple(report for report in self.reports if report.generation >= key - 1),
            gone=tuple(cause for cause in self.gone if cause.generation >= key - 1),
            gone_s=self.gone_s,
            syncs=tuple(sync for sync in self.syncs if sync.generation >= key),
            left=tuple(number for number in self.left if number >= key - 1),
        )

    def with_recorded(self, key: int, record: IncidentRecord) -> Incident:
        """With the causes that only an earlier leader has learnt of, if this agent is about to replace its record."""
        if self.told is not None or (key, record.repeat) != (self.key, self.repeat):
            return self
        known = {(cause.generation, cause.node) for cause in (*causes(self), *self.inherited)}
        more = tuple(c for c in record.causes if weight(c.kind) > 0 and (c.generation, c.node) not in known)
        return replace(self, inherited=(*self.inherited, *more)) if more else self

    def with_mark(self, phase: str, now_s: float) -> Incident:
        times = {**dict(self.timeline_s), phase: round(now_s - self.began_s, 4)}
        return replace(self, timeline_s=tuple(times.items()))

    def marked(self, phase: str) -> bool:
        return any(name == phase for name, _ in self.timeline_s)


def causes(incident: Incident) -> tuple[Cause, ...]:
    """All failures, by generation; in each the causes before the consequences."""
    found: list[Cause] = []
    for report in incident.reports:
        found.append(_cause(report.generation, report.node, kind_of(report), report.ranks,
                            report.detail))  # fmt: skip
        others = (loss for loss in report.also if not spread(report, loss))
        found += [_cause(report.generation, loss.node, loss.kind, loss.ranks, loss.detail) for loss in others]
    found += incident.gone
    # An earlier leader has inferred from absence or silence that a node was lost; the job went on with that node, and
    # another cause explains the failure of the same generation.
    doubted = [cause for cause in incident.inherited if _kept_its_place(incident, cause)]
    told = [cause for cause in incident.inherited if cause not in doubted]
    explained = {cause.generation for cause in (*told, *found) if weight(cause.kind) > 0}
    found = [*told, *(cause for cause in doubted if cause.generation not in explained), *found]
    return tuple(sorted(dict.fromkeys(found), key=lambda c: (c.generation, weight(c.kind) == 0)))


def _kept_its_place(incident: Incident, cause: Cause) -> bool:
    """Whether the same agent of a node that is named as lost has a place in each generation since, one at least."""
    before = next((g for g in incident.generations if g.number == cause.generation), None)
    place = before.nodes[at] if before is not None and (at := before.at(cause.node)) is not None else None
    since = [formed for formed in incident.generations if formed.number > cause.generation]
    if cause.kind not in UNPROVEN or place is None or not since:
        return False
    return all(formed.node_of(place.node, place.incarnation) is not None for formed in since)


def _cause(generation: int, node: str, kind: str, ranks: Iterable[int], detail: Text) -> Cause:
    return Cause(generation=generation, node=node, kind=kind, ranks=tuple(sorted(ranks)), detail=detail)


def steps_lost(syncs: Iterable[Sync]) -> int:
    """How many different steps were committed and then had to be repeated."""
    lost, top = 0, 0
    for resumed, reached in sorted((sync.resumed, sync.reached) for sync in syncs):
        lost += max(0, reached - max(resumed, top))
        top = max(top, reached)
    return lost


def syncs_with_reported_steps(incident: Incident) -> tuple[Sync, ...]:
    """The syncs, each with the newest step that a failure report since the sync before it names. A step of a generation
    before the one that failed is not counted: if the job went back behind it, an incident before this one says so."""
    found: list[Sync] = []
    for sync in incident.syncs:
        since = found[-1].generation if found else 0
        reports = [report for report in incident.reports if since <= report.generation < sync.generation]
        ends: list[BrokenRecord | Loss] = [*reports, *(loss for report in reports for loss in report.also)]
        steps = (end.step or 0 for end in ends if not 0 < end.step_in < incident.key - 1)
        found.append(replace(sync, reached=max(sync.reached, *steps, 0)))
    return tuple(found)


def effective_syncs(syncs: Iterable[Sync]) -> tuple[Sync, ...]:
    """The syncs that later ones have not made up for, by generation. A recovery may resume from setup, fail again, and
    resume from a checkpoint of before that was still being written, or from the state of a node that has come back:
    what setup had cost is not lost then, but for the steps beyond that."""
    kept: list[Sync] = []
    for sync in sorted(syncs, key=lambda sync: sync.generation):
        if sync.origin is not Origin.LIVE or sync.older:  # other live state has what was committed before
            outdone = [earlier for earlier in kept if earlier.resumed < sync.resumed]
            kept = [earlier for earlier in kept if earlier.resumed >= sync.resumed]
            reached = max(sync.reached, *(earlier.reached for earlier in outdone), 0)
            sync = replace(sync, reached=reached)
        kept.append(sync)
    return tuple(kept)


def with_wall_times(
    record: IncidentRecord,
    began_s: float,
    now_s: float,
    noticed_wall_s: float,
    *,
    stepped_s: float = -math.inf,
    left_wall_s: float = 0.0,
) -> IncidentRecord:
    """The record with its times of day; `began_s`: the monotonic instant from which its timeline counts, and
    `noticed_wall_s` its time of day; `now_s`: the present. `stepped_s`, `left_wall_s`: as in `Incident`.

    A beginning that another node has written stays as it is, by that node's clock, and so do the times after it. How
    long the incident had lasted when this agent noticed it follows from that only within what this node's own clocks
    allow: two nodes' clocks may differ.
    """
    began_wall_s = record.wall_s or noticed_wall_s
    since_left_s = noticed_wall_s - left_wall_s if left_wall_s else math.inf
    late_s = min(noticed_wall_s - began_wall_s, began_s - stepped_s, since_left_s)
    if late_s < 0.0:  # that clock is ahead of this one
        late_s = since_left_s if math.inf > since_left_s > 0.0 else 0.0
    return replace(
        record,
        wall_s=began_wall_s,
        timeline_s={phase: round(at_s + late_s, 4) for phase, at_s in record.timeline_s.items()},
        ended_wall_s=None if record.open else began_wall_s + late_s + (now_s - began_s),
    )


def cause_fields(found: Sequence[Cause], *, planned: bool = False, why: Text = "") -> dict[str, Any]:
    """The fields in which a record names its causes. `found`: as `causes` gives it."""
    real = [c for c in found if weight(c.kind) > 0]
    told = real or ([] if planned else found)
    if not told:
        return {"kind": "planned" if planned else "lost", "node": "", "ranks": (), "detail": why}
    alike = [c for c in told if c.generation == told[0].generation]
    return {
        "kind": told[0].kind,
        "node": ", ".join(dict.fromkeys(c.node for c in alike)),
        "ranks": tuple(sorted({rank for c in alike for rank in c.ranks})),
        "detail": told[0].detail,
        "further": max(0, len(real) - 1),
    }


def open_record(incident: Incident, *, counted: bool) -> IncidentRecord:
    """The record of an incident that is not over. `counted`: the workers' steps are known (they use `elastic`)."""
    found = causes(incident)
    error = next((report.error for report in incident.reports if report.error is not None), None)
    return IncidentRecord(
        **cause_fields(found, planned=incident.planned, why=incident.why),
        generation=incident.key,
        wall_s=incident.began_wall_s,
        timeline_s=dict(incident.timeline_s),
        open=True,
        repeat=incident.repeat,
        causes=found[:KEPT_CAUSES],
        step=incident.reached if counted else None,
        world_size_before=incident.generations[0].world_size,
        stacks={name: stack for report in incident.reports for name, stack in report.stacks.items()},
        last_lines=next((report.last_lines for report in incident.reports if report.last_lines), ()),
        error=error,
    )


def begun_again_at(origin: Origin | None, reached: int) -> int:
    """As in the record, if the job went on from `origin`, and had come to step `reached`."""
    return max(0, reached) if origin is Origin.SETUP else 0


def closed(
    incident: Incident, generation: GenerationRecord, *, recovered: bool, counted: bool, witnessed: bool = True
) -> IncidentRecord:
    """The record of an incident that is over: the job steps again in `generation`, or was given up.

    `witnessed`: this agent had a place in the generation that failed. Otherwise the number of lost steps is not known,
    unless no cause is worse than a drain.
    """
    drawing = open_record(incident, counted=counted)
    all_syncs = syncs_with_reported_steps(incident)
    syncs = effective_syncs(all_syncs)
    worst = max(syncs, key=lambda s: (s.reached - s.resumed, -s.generation), default=None)
    # A planned change that the end of the job interrupts costs nothing.
    cut_short = incident.planned and not causes(incident)
    as_planned = all(weight(cause.kind) <= weight("drain") for cause in causes(incident))
    told = recovered and not incident.reached_before and (witnessed or as_planned)
    known = counted and (told or cut_short)
    least = steps_lost(syncs) if known and (syncs or not recovered) else None
    # A generation whose state was replaced by newer state may have committed that itself.
    most = least if least is None else max(least, steps_lost(all_syncs))
    if least is not None and not _certain(incident, generation):
        # A rank commits a step only after all others have contributed to it: it is at most one step ahead of them.
        live = all(sync.origin is Origin.LIVE for sync in all_syncs)
        most = least + 1 if live else None
    return replace(
        drawing,
        open=False,
        generation=generation.number + (0 if recovered else 1),
        begun_again_at=begun_again_at(worst.origin, worst.reached) if worst else 0,
        step=max([drawing.step or 0, *(sync.reached for sync in all_syncs[:1])]) if counted else None,
        steps_lost=least,
        steps_lost_at_most=most,
        world_size_after=generation.world_size if recovered else 0,
        restored_from=(worst.source if worst else "") if recovered else Origin.NOTHING.value,
        origin=(worst.origin if worst else None) if recovered else Origin.NOTHING,
    )


class Closed(msgspec.Struct, frozen=True):
    """An incident that is over, kept to add failures that are reported afterwards."""

    incident: Incident
    generation: GenerationRecord
    """The one in which the job resumed, or was given up."""
    recovered: bool
    counted: bool
    witnessed: bool
    written: bool = False
    """By this agent, or about to be."""

    @property
    def false_alarm(self) -> bool:
        """Whether the generation of which it is stepped on."""
        return self.recovered and self.generation.number < self.incident.key

    def is_open(self, seen: tuple[int, IncidentRecord] | None) -> bool:
        """Whether `seen`, the (key, record) that is open on record, is of this incident."""
        return seen is not None and (self.incident.key, self.incident.repeat) == (seen[0], seen[1].repeat)

    def record(self) -> IncidentRecord:
        return closed(
            self.incident, self.generation,
            recovered=self.recovered, counted=self.counted, witnessed=self.witnessed,
        )  # fmt: skip

    def with_report(self, report: BrokenRecord) -> Closed:
        """With `report` added, unless the job recovered in its generation or before: that is another incident."""
        if report.generation > self.generation.number - self.recovered:
            return self
        incident = self.incident.with_report(report)
        if incident is self.incident:
            return self
        return replace(self, incident=incident)


def merged_record(known: IncidentRecord, fuller: IncidentRecord) -> IncidentRecord:
    """`known`, the record of an incident that is over, with the causes and losses of `fuller`; unchanged unless
    `fuller` names all of its causes and more (consequences do not count). Its times and its outcome stay."""
    named, names = ({cause for cause in record.causes if weight(cause.kind) > 0} for record in (known, fuller))
    if not named < names:
        return known
    fewer = fuller.steps_lost is None or fuller.steps_lost < (known.steps_lost or 0)
    told = known if fewer else fuller
    return replace(
        known,
        kind=fuller.kind,
        node=fuller.node,
        ranks=fuller.ranks,
        detail=fuller.detail,
        further=fuller.further,
        begun_again_at=fuller.begun_again_at,
        causes=fuller.causes,
        stacks=fuller.stacks or known.stacks,
        last_lines=fuller.last_lines or known.last_lines,
        error=fuller.error or known.error,
        step=max((s for s in (known.step, fuller.step) if s is not None), default=None),
        steps_lost=told.steps_lost,
        steps_lost_at_most=told.steps_lost_at_most,
    )


def _certain(incident: Incident, generation: GenerationRecord) -> bool:
    """Whether the last step of every rank is known. It is not for a lost node whose agent has not reported it."""
    if incident.planned and not incident.reports and not incident.gone and not incident.inherited:
        return not incident.syncs or _none_ahead(incident, generation)
    if incident.generations[0].number >= incident.key:
        return False  # an earlier leader began the record, and this agent does not know the generation that failed
    if _set_back_unseen(incident):
        return False
    there = {(p.node, p.incarnation) for p in generation.nodes}
    # The newest place of each: an exit that was reported before says nothing of the worker that has replaced it.
    missing = {
        (p.node, p.incarnation): (formed.number, p)
        for formed in sorted(incident.generations, key=lambda formed: formed.number)
        for p in formed.nodes
        if (p.node, p.incarnation) not in there
    }
    return all(set(p.slots) <= _reported(incident, number, p) for number, p in missing.values())


def _none_ahead(incident: Incident, generation: GenerationRecord) -> bool:
    """Whether no rank that a planned change leaves out can have committed a step more than those of `generation`. Where
    all ranks abort in the middle of a step, one that has completed it takes it along."""
    before = range(incident.first, generation.number)
    if set(before) <= set(incident.left):
        return True
    there = {(p.node, p.incarnation): set(p.slots) for p in generation.nodes}
    known = {g.number: g.nodes for g in incident.generations}
    stay = (set(p.slots) <= there.get((p.node, p.incarnation), set()) for n in before for p in known.get(n, ()))
    return set(before) <= set(known) and all(stay)


def _set_back_unseen(incident: Incident) -> bool:
    """Whether a worker has ended after a further generation had given it another state, of which this agent learnt
    nothing: the step that its end names says nothing of what it had committed before."""
    seen = {sync.generation for sync in incident.syncs}
    for report in incident.reports:
        ends: list[BrokenRecord | Loss] = [report, *report.also]
        if any(end.kind in ENDS and end.step_in >= incident.key and end.step_in not in seen for end in ends):
            return True
    return False


def _reported(incident: Incident, number: int, place: GenerationNode) -> set[int]:
    """Slots of `place` in generation `number` whose workers' exits, and with them their last steps, were reported."""
    found: set[int] = set()
    for report in incident.reports:
        if report.generation != number:
            continue
        ends: list[BrokenRecord | Loss] = [report, *report.also]
        found |= {s for end in ends if end.node == place.node and end.kind in ENDS for s in end.slots}
    return found
