"""One outage or planned change, as far as an agent has learnt of it, and the account that it gives of that. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from elastic.contract.records.incident_account import Absence, IncidentAccount, Outcome, Seen
from elastic.contract.records.incident_fold import KEPT_CAUSES
from elastic.contract.records.job_records import BrokenRecord, Cause, GenerationRecord
from elastic.contract.structs import replace

from .evidence import merged

KEPT_REPEATS = 20
"""How many further incidents of one generation an agent gives accounts of, while it steps on after each. Those after
them share one account, that of the newest."""

KEPT_NODES = 1000
"""How many lost nodes an account names."""


class Incident(Seen, frozen=True, kw_only=True):
    """An incident that is not over."""

    generations: tuple[GenerationRecord, ...]
    """The first one, if it is known here, and those that followed it during the recovery."""
    began_s: float
    """The instant of `noticed_wall_s`: a clock that is set later changes no time of the account."""
    stepped_s: float = float("-inf")
    """Monotonic instant at which this agent last saw a step: it did not begin before. -inf: it has seen none."""
    reports: tuple[BrokenRecord, ...] = ()
    """Of the generations that broke, oldest first."""
    gone_s: tuple[tuple[str, float], ...] = ()
    """(node, monotonic instant at which this agent learnt it) of those whose member key was still there."""
    timeline_s: tuple[tuple[str, float], ...] = ()
    told: tuple[Cause, ...] | None = None
    """Those in its account as it was written last; None: it was not."""

    def with_report(self, report: BrokenRecord) -> Incident:
        """With `report` merged into what is known of its generation: etcd may not show yet what was just reported."""
        if report in self.reports or report.generation < self.first:
            return self
        earlier = next((r for r in self.reports if r.generation == report.generation), None)
        if earlier is not None and (report := merged(report, earlier)) == earlier:
            return self
        others = [r for r in self.reports if r is not earlier]
        return replace(self, reports=tuple(sorted([*others, report], key=lambda each: each.generation)))

    def with_left(self, generations: Iterable[int]) -> Incident:
        """With these in `left`."""
        more = {number for number in generations if number >= self.first}.difference(self.left)
        return replace(self, left=tuple(sorted([*self.left, *more]))) if more else self

    def with_mark(self, phase: str, now_s: float) -> Incident:
        times = {**dict(self.timeline_s), phase: round(now_s - self.began_s, 4)}
        return replace(self, timeline_s=tuple(times.items()))

    def marked(self, phase: str) -> bool:
        return any(name == phase for name, _ in self.timeline_s)


class AccountFacts(msgspec.Struct, frozen=True):
    """What an account is made from: of a thousand agents that have seen an incident one makes it."""

    incident: Incident
    newest: GenerationRecord
    outcome: Outcome
    stepped_on_at: tuple[int, int]
    """How far the job is."""
    counted: bool


def account(facts: AccountFacts, *, node: str, by: str) -> IncidentAccount:
    """What the agent `by` of `node` tells of it."""
    incident, newest = facts.incident, facts.newest
    first, late_s = incident.generations[0], incident.began_s - incident.stepped_s
    seen = {name: getattr(incident, name) for name in Seen.__struct_fields__}
    seen |= {
        "gone": _bounded(incident.gone),
        "syncs": incident.syncs[-KEPT_CAUSES:],
        "left": incident.left[-KEPT_CAUSES:],
    }
    return IncidentAccount(
        **seen,
        by=by,
        last=newest.number,
        outcome=facts.outcome,
        stepped_on_at=facts.stepped_on_at,
        counted=facts.counted,
        witnessed=first.at(node) is not None,
        world_size_before=first.world_size,
        world_size_after=newest.world_size,
        late_s_at_most=late_s if late_s < float("inf") else None,
        timeline_s=dict(incident.timeline_s),
        absent=_absent(incident, newest),
        all_stay=_all_stay(incident, newest),
    )


def _bounded(gone: tuple[Cause, ...]) -> tuple[Cause, ...]:
    return (*gone[:KEPT_CAUSES], *(replace(each, detail="") for each in gone[KEPT_CAUSES:KEPT_NODES]))


def _absent(incident: Incident, newest: GenerationRecord) -> tuple[Absence, ...] | None:
    if incident.generations[0].number > incident.first:
        return None
    generations = sorted(
        {g.number: g for g in (*incident.generations, newest)}.values(), key=lambda formed: formed.number
    )
    absences = []
    for at, (before, after) in enumerate(itertools.pairwise(generations)):
        for place in before.absent(after):
            back = any(later.node_of(place.node, place.incarnation) for later in generations[at + 2 :])
            absences.append(Absence(before.number, place.node, place.slots, back))
    return tuple(absences) if len(absences) <= KEPT_CAUSES else None


def _all_stay(incident: Incident, newest: GenerationRecord) -> bool:
    generations = {formed.number: formed for formed in incident.generations}
    before = range(incident.first, newest.number)
    return set(before) <= generations.keys() and all(
        (there := newest.node_of(place.node, place.incarnation)) and {*place.slots} <= {*there.slots}
        for number in before
        for place in generations[number].changed(newest)
    )
