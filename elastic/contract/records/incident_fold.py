"""The incidents of a job, from what its agents have written of them. Pure.

Every fact has the number of its generation. The generations that have stepped divide them: what failed from one of
these until the next one is one incident, and its identity is the generation that stepped last before it. If a
generation stands still and steps on, that was a false alarm, an incident of its own: the steps that were reached order
these.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from elastic.contract.keys import NUMBER_DIGITS
from elastic.contract.origin import Origin
from elastic.contract.structs import replace

from .incident_account import Absence, IncidentAccount, Outcome, Sync, kind_of, spread, weight
from .job_records import BrokenRecord, Cause, IncidentRecord, Loss
from .reasons import Text

KEPT_CAUSES = 400
"""How many causes of an incident its record lists, the first ones; `further` counts all."""

UNPROVEN = ("lost", "unreachable")
"""Causes that another agent has inferred: the node may live, and its ranks step."""

ENDS = ("exit", "respawn")
"""Kinds of reports that are made when the process has ended: its last step is known then."""


class Facts(msgspec.Struct, frozen=True):
    """What belongs to one incident."""

    first: int
    """The generation that failed first."""
    accounts: tuple[IncidentAccount, ...]
    """In the order in which they were begun."""
    ends_in: int = 0
    """The generation that has stepped after it; 0: none is known to."""
    reports: tuple[BrokenRecord, ...] = ()
    """Of the generations that broke, oldest first."""
    repeat: int = 0

    @property
    def openers(self) -> list[IncidentAccount]:
        """Of the agents that saw it begin, the first one first."""
        return [account for account in self.accounts if self.has(account.first)]

    def has(self, generation: int) -> bool:
        """Whether a failure of this generation belongs to it. A false alarm ends in the generation that it is of."""
        return self.first <= generation and (generation < self.ends_in or self.ends_in <= self.first)

    @property
    def closer(self) -> IncidentAccount | None:
        ends = (a for a in self.accounts if a.outcome is not Outcome.OPEN)
        own = (a for a in ends if (a.last == self.ends_in if a.outcome is Outcome.STEPPING else not self.ends_in))
        return max(own, key=lambda account: account.witnessed, default=None)

    @property
    def main(self) -> IncidentAccount:
        """The one that knows most."""
        return self.closer or self.accounts[-1]


def incidents(
    accounts: Sequence[IncidentAccount], reports: Iterable[BrokenRecord] = (), stepped_in: int = 0
) -> list[IncidentRecord]:
    """Those of one job, oldest first. `accounts`: in the order in which they were begun; `stepped_in`: the newest
    generation that is known to have stepped."""
    records = [record(facts) for facts in divided(accounts, reports, stepped_in)]
    return [_ended_before(*pair) for pair in itertools.pairwise(records)] + records[-1:]


def _ended_before(record: IncidentRecord, following: IncidentRecord) -> IncidentRecord:
    """`record`, which has ended where the next incident begins, if no account tells its end."""
    if record.ended_wall_s is not None:
        return record
    lasted_s = round(max(0.0, following.wall_s - record.wall_s), 4)
    return replace(
        record, open=False, ended_wall_s=record.wall_s + lasted_s, timeline_s={"stepping": lasted_s},
        world_size_after=following.world_size_before,
    )  # fmt: skip


# ── which facts belong together ─────────────────────────────────────────────────────────────────────────────


def divided(accounts: Iterable[IncidentAccount], reports: Iterable[BrokenRecord], stepped_in: int = 0) -> list[Facts]:
    sound = [account for account in accounts if 0 < account.first <= account.last]
    stepped = {stepped_in, *(a.stepped_in for a in sound), *(a.last for a in sound if a.outcome is Outcome.STEPPING)}
    ends = sorted(stepped - {0})
    alarms: dict[int, list[list[IncidentAccount]]] = {}
    for account in sorted(filter(_is_alarm, sound), key=lambda account: account.reached):
        if (alarm := _alarm_of(account, alarms)) is not None:
            alarm.append(account)
        else:
            alarms.setdefault(account.first, []).append([account])
    parts: dict[int, list[IncidentAccount]] = {}
    for account in itertools.filterfalse(_is_alarm, sound):
        lasts = account.outcome is Outcome.OPEN and account.counted
        if lasts and (alarm := _alarm_of(account, alarms)) is not None:
            alarm.insert(0, account)
            continue
        for part in _parts(account, ends):
            parts.setdefault(part, []).append(account)
    all_facts = [
        Facts(first, tuple(alarm), first, repeat=repeat)
        for first, of_generation in alarms.items()
        for repeat, alarm in enumerate(of_generation)
    ]
    broken = sorted(reports, key=lambda report: report.generation)
    for part, members in parts.items():
        since, until = ends[part - 1] if part else 0, ends[part] if part < len(ends) else 0
        first = since or min(min(account.failed) for account in members)
        facts = Facts(first, tuple(members), until, repeat=len(alarms.get(first, ())))
        all_facts.append(replace(facts, reports=tuple(r for r in broken if facts.has(r.generation))))
    return sorted(all_facts, key=lambda facts: (facts.first, facts.repeat))


def _is_alarm(account: IncidentAccount) -> bool:
    """Whether the generation of which it is stepped on."""
    return account.outcome is Outcome.STEPPING and account.last == account.first


def _parts(account: IncidentAccount, ends: list[int]) -> set[int]:
    """The places, among the parts into which `ends` divides the generations, in which this account tells something."""
    parts = {bisect_right(ends, generation) for generation in account.failed}
    if account.outcome is Outcome.STEPPING:
        parts.add(bisect_right(ends, account.last) - 1)
    elif account.outcome is Outcome.GIVEN_UP:
        parts.add(bisect_right(ends, account.last))
    return parts


def _alarm_of(
    account: IncidentAccount, alarms: Mapping[int, list[list[IncidentAccount]]]
) -> list[IncidentAccount] | None:
    """The false alarm that another agent has told of, too: no step had followed when this one saw it begin."""
    for alarm in alarms.get(account.first, ()):
        if own := next((own for own in alarm if own.by == account.by), None):
            if own.repeat == account.repeat:
                return alarm
        elif account.reached <= max(known.stepped_on_at for known in alarm if _is_alarm(known)):
            return alarm
    return None


# ── one incident ────────────────────────────────────────────────────────────────────────────────────────────


def record(facts: Facts) -> IncidentRecord:
    """The incident, open as long as no fact shows that the job steps again or is over."""
    main, named, reports = facts.main, causes(facts), facts.reports
    opener = next(iter(facts.openers), main)
    closer = facts.closer
    again = f".again.{facts.repeat}" if facts.repeat else ""
    drawing = IncidentRecord(
        **cause_fields(named, planned=opener.planned, why=opener.why),
        id=f"{facts.first + 1:0{NUMBER_DIGITS}d}{again}",
        generation=facts.first + 1,
        wall_s=opener.began_wall_s or opener.noticed_wall_s,
        still_s=0.0 if opener.began_wall_s else opener.still_s,
        open=closer is None and not facts.ends_in,
        repeat=facts.repeat,
        causes=named[:KEPT_CAUSES],
        step=_reached(facts) if main.counted else None,
        world_size_before=opener.world_size_before,
        stacks={name: stack for report in reports for name, stack in report.stacks.items()},
        last_lines=next((report.last_lines for report in reports if report.last_lines), ()),
        error=next((report.error for report in reports if report.error is not None), None),
    )
    if closer is None:
        return _at_times(replace(drawing, generation=facts.ends_in or drawing.generation), main)
    return _at_times(_closed(drawing, facts, closer, named), closer, ends=True)


def _closed(drawing: IncidentRecord, facts: Facts, closer: IncidentAccount, named: tuple[Cause, ...]) -> IncidentRecord:
    recovered, counted = closer.outcome is Outcome.STEPPING, closer.counted
    all_syncs = syncs_with_reported_steps(facts, named)
    syncs = effective_syncs(all_syncs)
    worst = max(syncs, key=lambda s: (s.reached - s.resumed, -s.generation), default=None)
    # A planned change that the end of the job interrupts costs nothing.
    cut_short = closer.planned and not named
    as_planned = all(weight(cause.kind) <= weight("drain") for cause in named)
    # What is known of may be of a generation before the one that failed, which may have begun from earlier state.
    reached_before = 0 < closer.reached[0] < closer.first
    resumed = recovered and not reached_before and (closer.witnessed or as_planned)
    countable = counted and (resumed or cut_short)
    least = steps_lost(syncs) if countable and (syncs or not recovered) else None
    # A generation whose state was replaced by newer state may have committed that itself.
    most = least if least is None else max(least, steps_lost(all_syncs))
    if least is not None and not _certain(facts, closer, named):
        # A rank commits a step only after all others have contributed to it: it is at most one step ahead of them.
        live = all(sync.origin is Origin.LIVE for sync in all_syncs)
        most = least + 1 if live else None
    return replace(
        drawing,
        generation=closer.last + (0 if recovered else 1),
        begun_again_at=max(0, worst.reached) if worst and worst.origin is Origin.SETUP else 0,
        step=max([drawing.step or 0, *(sync.reached for sync in all_syncs[:1])]) if counted else None,
        steps_lost=least,
        steps_lost_at_most=most,
        world_size_after=closer.world_size_after if recovered else 0,
        restored_from=(worst.source if worst else "") if recovered else Origin.NOTHING.value,
        origin=(worst.origin if worst else None) if recovered else Origin.NOTHING,
    )


def _at_times(record: IncidentRecord, account: IncidentAccount, *, ends: bool = False) -> IncidentRecord:
    """`record` with the phases that `account` tells, and its end. When it began another node may have written, by its
    clock: how long it had lasted when this one noticed it follows from that only within what this node's own clocks
    allow, since two nodes' clocks may differ."""
    since_left_s = account.noticed_wall_s - account.left_wall_s if account.left_wall_s else math.inf
    stepped_s = math.inf if account.late_s_at_most is None else account.late_s_at_most
    late_s = min(account.noticed_wall_s - record.wall_s, stepped_s, since_left_s)
    if late_s < 0.0:  # that clock is ahead of this one
        late_s = since_left_s if math.inf > since_left_s > 0.0 else 0.0
    times = {phase: round(at_s + late_s, 4) for phase, at_s in account.timeline_s.items()}
    ended_wall_s = record.wall_s + times.get(account.outcome, late_s) if ends else None
    return replace(record, timeline_s=times, ended_wall_s=ended_wall_s)


# ── its causes ──────────────────────────────────────────────────────────────────────────────────────────────


def causes(facts: Facts) -> tuple[Cause, ...]:
    """All failures, by generation; in each the causes before the consequences."""
    proven: list[Cause] = []
    for report in facts.reports:
        proven.append(_cause(report.generation, report.node, kind_of(report), report.ranks,
                            report.detail))  # fmt: skip
        others = (loss for loss in report.also if not spread(report, loss))
        proven += [_cause(report.generation, loss.node, loss.kind, loss.ranks, loss.detail) for loss in others]
    proven += _gone(facts, facts.main)
    places = {(cause.generation, cause.node) for cause in proven}
    inferred: dict[tuple[int, str], Cause] = {}
    for cause in itertools.chain.from_iterable(_gone(facts, account) for account in facts.accounts):
        if (cause.generation, cause.node) not in places:
            inferred.setdefault((cause.generation, cause.node), cause)
    # Another agent has inferred from absence or silence that a node was lost; the job went on with that node, and
    # another cause explains the failure of the same generation.
    kept_places = _kept_places(facts.main)
    certain = [cause for cause in inferred.values() if not kept_places(cause)]
    doubted = [cause for cause in inferred.values() if kept_places(cause)]
    explained = {cause.generation for cause in (*certain, *proven) if weight(cause.kind) > 0}
    proven = [*certain, *(cause for cause in doubted if cause.generation not in explained), *proven]
    return tuple(sorted(dict.fromkeys(proven), key=lambda c: (c.generation, weight(c.kind) == 0)))


def _gone(facts: Facts, account: IncidentAccount) -> list[Cause]:
    """What `account` has seen to be gone. Not a node of the generation which stepped next that was thought to be lost
    before it did so: its ranks have stepped."""
    stepped = account.last if account.outcome is Outcome.STEPPING and account.last > account.first else 0
    missing = {absence.node for absence in account.absent or ()}

    def mistaken(gone: Cause) -> bool:
        known = account.absent is not None and gone.node not in missing
        return known and gone.kind in UNPROVEN and gone.generation == stepped != 0

    return [gone for gone in account.gone if facts.has(account.failed_in(gone)) and not mistaken(gone)]


def _cause(generation: int, node: str, kind: str, ranks: Iterable[int], detail: Text) -> Cause:
    return Cause(generation=generation, node=node, kind=kind, ranks=tuple(sorted(ranks)), detail=detail)


def _kept_places(account: IncidentAccount) -> Callable[[Cause], bool]:
    """Of a node that is named as lost, whether it has a place in each generation since, one at least, by `account`."""
    missing = {absence.node: absence.generation for absence in account.absent or ()}  # oldest first

    def kept(cause: Cause) -> bool:
        seen = account.absent is not None and account.first <= cause.generation < account.last
        return seen and cause.kind in UNPROVEN and missing.get(cause.node, 0) < cause.generation

    return kept


def cause_fields(named: Sequence[Cause], *, planned: bool = False, why: Text = "") -> dict[str, Any]:
    """The fields in which a record names its causes. `named`: as `causes` gives it."""
    real = [c for c in named if weight(c.kind) > 0]
    shown = real or ([] if planned else named)
    if not shown:
        return {"kind": "planned" if planned else "lost", "node": "", "ranks": (), "detail": why}
    alike = [c for c in shown if c.generation == shown[0].generation]
    return {
        "kind": shown[0].kind,
        "node": ", ".join(dict.fromkeys(c.node for c in alike)),
        "ranks": tuple(sorted({rank for c in alike for rank in c.ranks})),
        "detail": shown[0].detail,
        "further": max(0, len(real) - 1),
    }


# ── its cost ────────────────────────────────────────────────────────────────────────────────────────────────


def _reached(facts: Facts) -> int:
    """Who learnt late that it had begun may know of commits after it, too."""
    before = (account.reached for account in facts.openers if account.reached[0] <= facts.first)
    return max(before, default=(0, 0))[1]


def _syncs(facts: Facts) -> list[Sync]:
    """By generation; as the account that knows most has it."""
    accounts = (*facts.accounts, facts.main)
    own = {
        s.generation: s for a in accounts for s in a.syncs if facts.first < s.generation <= (facts.ends_in or math.inf)
    }
    return [own[generation] for generation in sorted(own)]


def syncs_with_reported_steps(facts: Facts, named: Sequence[Cause]) -> tuple[Sync, ...]:
    """The syncs, each with the newest step that a failure report since the sync before it names. A step of a generation
    before the one that failed is not counted: if the job went back behind it, an incident before this one says so."""
    syncs: list[Sync] = []
    for sync in _syncs(facts):
        since = syncs[-1].generation if syncs else 0
        ends = _ends(report for report in facts.reports if since <= report.generation < sync.generation)
        steps = [end.step or 0 for end in ends if not 0 < end.step_in < facts.first]
        if not syncs and (named or not facts.main.planned):
            steps.append(_reached(facts))
        syncs.append(replace(sync, reached=max(sync.reached, *steps, 0)))
    return tuple(syncs)


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


def steps_lost(syncs: Iterable[Sync]) -> int:
    """How many different steps were committed and then had to be repeated."""
    lost, top = 0, 0
    for resumed, reached in sorted((sync.resumed, sync.reached) for sync in syncs):
        lost += max(0, reached - max(resumed, top))
        top = max(top, reached)
    return lost


def _certain(facts: Facts, closer: IncidentAccount, named: Sequence[Cause]) -> bool:
    """Whether the last step of every rank is known. It is not for a lost node whose agent has not reported it."""
    if closer.planned and not named:
        return not _syncs(facts) or _none_ahead(facts, closer)
    if closer.first > facts.first or closer.absent is None:
        return False  # another agent has seen it begin, and this one does not know the generation that failed
    if _set_back_unseen(facts):
        return False
    return all(set(place.slots) <= _reported(facts, place) for place in closer.absent if not place.back)


def _none_ahead(facts: Facts, closer: IncidentAccount) -> bool:
    """Whether no rank that a planned change leaves out can have committed a step more than those of the last
    generation. Where all ranks abort in the middle of a step, one that has completed it takes it along."""
    if closer.all_stay or closer.last - closer.first > len(closer.left):
        return closer.all_stay
    return set(range(closer.first, closer.last)) <= set(closer.left)


def _set_back_unseen(facts: Facts) -> bool:
    """Whether a worker has ended after a further generation had given it another state, of which nothing is told: the
    step that its end names says nothing of what it had committed before."""
    seen = {sync.generation for sync in _syncs(facts)}
    ends = (end for end in _ends(facts.reports) if end.kind in ENDS)
    return any(end.step_in > facts.first and end.step_in not in seen for end in ends)


def _reported(facts: Facts, place: Absence) -> set[int]:
    """Slots of `place` whose workers' exits, and with them their last steps, were reported."""
    ends = _ends(report for report in facts.reports if report.generation == place.generation)
    return {slot for end in ends if end.node == place.node and end.kind in ENDS for slot in end.slots}


def _ends(reports: Iterable[BrokenRecord]) -> Iterator[BrokenRecord | Loss]:
    for report in reports:
        yield report
        yield from report.also
