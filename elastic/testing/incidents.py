"""Whether what is told of a job is true: its incidents compared with what was done to it, and with what its processes
wrote down. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from elastic.contract.records.incident_account import weight
from elastic.contract.records.job_records import IncidentRecord

from .history import Commit, History

CLOCK_S = 2.0  # from a fault to its notice, on a busy machine; a hang has its own silence besides
BUSY_S = 5.0  # the same, where whole clusters run beside each other
JITTER_S = 0.5


class What(enum.StrEnum):
    """A difference's kind, with its sentence: `said` is what is told, `true` what was so."""

    UNSTRUCK = "the fault has not struck: {true}"
    UNTOLD = "no incident tells of it: {true}"
    UNCAUSED = "no fault has caused it: {said}"
    STILL_OPEN = "it is not over: {said}"
    KIND = "its kind is {said}, not {true}"
    NODES = "nodes {said}, not {true}"
    RANKS = "ranks {said}, not {true}"
    WORLDS = "of worlds {said} it says, they were {true}"
    UNKNOWN_LOSS = "it is known how far the job had come, and it does not say what was lost"
    TOO_MANY_LOST = "{said} steps lost it says, {true} were done again"
    TOO_FEW_LOST = "at most {said} steps lost it says, {true} were done again"
    NO_END = "it does not say when it ended"
    BEGINNING = "it began {said:.2f} s after the strike, it says; that is noticed within {true:g} s"
    RECOVERED = "steps were made after it: {true}; it says {said}"
    NO_EVIDENCE = "{true!r} is not the evidence: {said}"
    INNOCENT = "nothing befell {said}"
    PHASES = "it lasted {true:.3f} s, and its phases are {said}"
    STEP = "step {true} was the newest, not {said}"
    SURVIVORS = "no rank that stepped before stepped again: {said}"
    STEPPED_AT = "it stepped again at {true}, not at {said}"
    STOOD_FROM = "it stood from {true}, not from {said}"
    NOT_RECOVERED = "no step was made again within {said:g} s: {true}"
    ENDED = "the job is {said}, not {true}"


class Difference(msgspec.Struct, frozen=True):
    what: What
    said: Any = None
    true: Any = None
    of: str = ""  # the incident, in few words

    def __str__(self) -> str:
        sentence = self.what.value.format(said=self.said, true=self.true)
        return f"{self.of}: {sentence}" if self.of else sentence


class Told(IncidentRecord, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """An incident as the API gives it, with further fields."""

    def __str__(self) -> str:
        ranks = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"incident {self.generation} ({self.kind}{ranks} on {self.node}: {str(self.detail)[:100]})"


Incident = IncidentRecord | Mapping[str, Any]


def as_told(incident: Incident) -> Any:
    return incident if isinstance(incident, IncidentRecord) else msgspec.convert(dict(incident), Told)


@dataclass(frozen=True)
class Injection:
    """What was done to a job, and what is to be one incident. Which ranks that were, and on which nodes, how large
    the world was before and after, which steps were done again, and when, is read from the job's recorded history."""

    kind: str | tuple[str, ...]
    """More than one: any of them is right, as the order in which they are seen is chance."""
    pids: tuple[int, ...] = ()  # worker processes that were struck
    nodes: tuple[str, ...] = ()  # that were struck; neither these nor `pids`: a planned change, which strikes nothing
    struck_s: float | None = None  # when, on the clock of the history; None: at an instant that is not known
    within_s: float = BUSY_S  # from the strike to its notice, at most
    words: tuple[str, ...] = ()  # some of the evidence
    recovered: bool = True  # whether the job has stepped again
    waited: bool = False  # whether the very generation goes on that stood still
    others: tuple[str, ...] = ()  # nodes that may be named besides, with what befell them during the recovery
    optional: bool = False  # it need not stop the job


def of_incident(
    incident: Incident, *, kind: str | Collection[str], nodes: Collection[str] = (),
    ranks: Collection[int] | None = None, redone: int | None = None, world_sizes: tuple[int, int] | None = None,
    struck_wall_s: float | None = None, noticed_within_s: float = CLOCK_S,
) -> Iterator[Difference]:  # fmt: skip
    """What an incident says that is not so. `kind`, `nodes` (none: any), `ranks`: of all that failed first; `redone`:
    committed steps that were committed again; `struck_wall_s`: it began then, or later."""
    told = as_told(incident)
    of = str(told)[:300]
    if told.open:
        yield Difference(What.STILL_OPEN, of)
        return
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    worlds, lost, most = (told.world_size_before, told.world_size_after), told.steps_lost, told.steps_lost_at_most
    late_s = told.wall_s - (told.wall_s if struck_wall_s is None else struck_wall_s)
    known, named = redone is not None and lost is not None, sorted(told.ranks)
    failed = named if ranks is None else sorted(ranks)
    said = (
        (told.kind not in kinds, What.KIND, told.kind, " or ".join(kinds)),
        (bool(nodes) and {*told.node.split(", ")} != {*nodes}, What.NODES, told.node, ", ".join(sorted(nodes))),
        (named != failed, What.RANKS, named, failed),
        (world_sizes not in (None, worlds), What.WORLDS, worlds, world_sizes),
        (redone is not None and lost is None, What.UNKNOWN_LOSS, None, None),
        (known and lost > redone, What.TOO_MANY_LOST, lost, redone),
        (known and lost <= redone and most is not None and redone > most, What.TOO_FEW_LOST, most, redone),
        (told.ended_wall_s is None, What.NO_END, None, None),
        (not -0.1 <= late_s <= noticed_within_s, What.BEGINNING, late_s, noticed_within_s),
    )
    yield from (Difference(what, what_said, true, of) for wrong, what, what_said, true in said if wrong)


def of_injection(
    history: History, incident: Incident, injection: Injection, *, wall_s: float, clock: bool = True
) -> Iterator[Difference]:
    """One incident compared with what was done, and with what the workers wrote down before and after it. `wall_s`: the
    wall clock at the zero of the history's clock; `clock`: instants can be compared, since all clocks are right."""
    told = as_told(incident)
    number = told.generation
    before = max((g for g in history.generations() if g < number + injection.waited), default=0)
    failed, again = history.of(before), history.of(number)
    if injection.waited:
        began_s = told.wall_s - wall_s
        failed, again = [c for c in failed if c.at_s < began_s], [c for c in again if c.at_s > began_s]
    if bool(again) != injection.recovered:
        yield Difference(What.RECOVERED, str(told), len(again))
    struck = [c for c in failed if c.node in injection.nodes or c.pid in injection.pids]
    yield from of_incident(
        incident, kind=injection.kind, nodes=sorted({c.node for c in struck} | set(injection.nodes)),
        ranks=sorted({c.rank for c in struck}) if failed else None,
        redone=history.redone(before, number) if failed and again and not injection.waited else None,
        world_sizes=(failed[0].world_size if failed else told.world_size_before, again[0].world_size if again else 0),
        struck_wall_s=wall_s + injection.struck_s if clock and injection.struck_s is not None else None,
        noticed_within_s=injection.within_s,
    )  # fmt: skip
    yield from (Difference(What.NO_EVIDENCE, told.detail, w) for w in injection.words if w not in str(told.detail))
    named = {c.node for c in told.causes if weight(c.kind) > weight("drain")}
    if innocent := named - {c.node for c in struck} - {*injection.nodes, *injection.others}:
        yield Difference(What.INNOCENT, ", ".join(sorted(innocent)), of=str(told))
    if told.ended_wall_s is not None:
        lasted_s = told.ended_wall_s - told.wall_s
        if not all(-0.001 <= at_s <= lasted_s + 0.1 for at_s in told.timeline_s.values()):
            yield Difference(What.PHASES, told.timeline_s, lasted_s, str(told))
        if failed and again:
            yield from _recovery(failed, again, told, wall_s, clock)


def _recovery(failed: list[Commit], again: list[Commit], told: Any, wall_s: float, clock: bool) -> Iterator[Difference]:
    of, top = str(told), max(c.step + 1 for c in failed)
    if told.steps_lost is not None and told.steps_lost == told.steps_lost_at_most and told.step != top:
        yield Difference(What.STEP, told.step, top, of)
    if told.restored_from == "live" and not {c.process for c in failed} & {c.process for c in again}:
        yield Difference(What.SURVIVORS, told.restored_from, of=of)
    if not clock:
        return
    first_s = {commit.rank: commit.at_s for commit in reversed(again)}
    ended_s, began_s = told.ended_wall_s - wall_s, told.wall_s - wall_s
    # What a rank has committed is written down by the rank a moment before or after its agent has heard of it.
    if not min(first_s.values()) - JITTER_S <= ended_s <= max(first_s.values()) + BUSY_S:
        yield Difference(What.STEPPED_AT, ended_s, sorted(first_s.values()), of)
    last_s = max(c.at_s for c in failed)
    if told.kind == "planned" and not last_s - CLOCK_S <= began_s <= min(first_s.values()) + JITTER_S:
        yield Difference(What.STOOD_FROM, began_s, (last_s, min(first_s.values())), of)
    # A rank may be a step ahead of the others. A commit is written down as it returns: at the abort, if it waits there.
    since_s, went_on = began_s - told.still_s, [c for c in failed if c.process in {c.process for c in again}]
    newest = [{c.process: c.at_s for c in went_on if c.at_s < before_s} for before_s in (began_s, float("inf"))]
    stood_s = sorted(at_s for each in newest for at_s in each.values())
    if told.still_s and stood_s and not stood_s[0] - CLOCK_S <= since_s <= stood_s[-1] + CLOCK_S:
        yield Difference(What.STOOD_FROM, since_s, (stood_s[0], stood_s[-1]), of)
