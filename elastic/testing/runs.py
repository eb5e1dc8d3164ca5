"""A whole run under faults: what followed each of them, and whether all that is told of it is true. Pure, on what a
run has left."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .faults import AnyFault, DropLink, Fail, Kill, LoseNode, Stop
from .history import History, Struck, struck
from .incidents import Difference, Incident, Injection, What, as_told, of_incident, of_injection

HANG_S, LEASE_S = 60.0, 20.0
"""From a hang, or the loss of a node, to its notice, at most."""


class Record:
    """A run of any script under `python -m elastic.testing`, from the folder that the plan names as its record.
    `faults`: what was planned."""

    def __init__(self, folder: str | os.PathLike[str], faults: Sequence[AnyFault] = ()) -> None:
        self.folder, self.faults = Path(folder), tuple(faults)

    def struck(self) -> list[Struck]:
        return struck(self.folder)

    @property
    def history(self) -> History:
        return History(self.folder).read()

    def incidents(self) -> list[Incident] | None:
        """The incidents that elasticd has recorded; None: the job ran without elasticd."""
        return None

    def phase(self) -> str:
        """The job's phase; empty: the job ran without elasticd."""
        return ""


class How(enum.StrEnum):
    NOT = "no step was made again"
    WENT_ON = "went on"
    REPLACED = "replaced, the others kept their processes"
    RESTARTED = "restarted"


class Recovery(msgspec.Struct, frozen=True):
    """What followed a fault."""

    struck: Struck
    how: How
    steps_lost: int = 0  # committed, and done again
    after_s: float | None = None  # from the strike until the first step

    def __str__(self) -> str:
        s = "" if self.steps_lost == 1 else "s"
        lost = "" if self.how is How.NOT else f", {self.steps_lost or 'no'} step{s} lost"
        return f"{self.struck.fault}: {self.how}{lost}"


def recoveries(run: Record) -> list[Recovery]:
    """One for each fault that has struck, in their order."""
    history = run.history
    return [_recovery(struck, history) for struck in run.struck()]


def _recovery(struck: Struck, history: History) -> Recovery:
    earlier = [c for c in history.commits if c.at_s <= struck.at_s]
    before = max((c.generation for c in earlier), default=0)
    newer = [c for c in history.commits if c.at_s > struck.at_s and c.generation > before]
    if not newer:
        later = [c for c in history.commits if c.at_s > struck.at_s and c.pid != struck.pid]
        ended = isinstance(struck.fault, Kill | Fail)
        return Recovery(struck, How.NOT if ended or not later else How.WENT_ON)
    again = min(c.generation for c in newer)
    kept = {c.process for c in earlier if c.generation == before} & {c.process for c in history.of(again)}
    how = How.REPLACED if kept else How.RESTARTED
    return Recovery(struck, how, history.redone(before, again), newer[0].at_s - struck.at_s)


def judge(run: Record, *, within_s: float = 60.0, end: str = "succeeded") -> list[Difference]:
    """All that is not as it should be: a fault that has not struck, or after which no step was made within `within_s`;
    an incident without a fault, a fault without one, one that does not say the truth; another end than `end`."""
    return [*_of_run(run, within_s, end), *_of_incidents(run)]


def _of_run(run: Record, within_s: float, end: str) -> Iterator[Difference]:
    past = [struck.fault for struck in run.struck()]
    yield from (Difference(What.UNSTRUCK, true=str(fault)) for fault in run.faults if fault not in past)
    if (phase := run.phase()) not in ("", end):
        yield Difference(What.ENDED, phase, end)
    for recovery in recoveries(run) if end == "succeeded" else ():
        late = recovery.after_s is not None and recovery.after_s > within_s
        if late or (recovery.how is How.NOT and not phase):
            yield Difference(What.NOT_RECOVERED, within_s, str(recovery.struck.fault))


def _of_incidents(run: Record) -> Iterator[Difference]:
    incidents, history, faults = run.incidents(), run.history, run.struck()
    if incidents is None:
        return
    told, answered = sorted(map(as_told, incidents), key=lambda i: i.wall_s), set[int]()
    for incident in told:
        if incident.kind in ("planned", "drain"):
            continue
        until_s = incident.ended_wall_s or float("inf")
        mine = [
            i for i, one in enumerate(faults)
            if i not in answered and incident.wall_s - expected(one).within_s <= one.wall_s <= until_s
        ]  # fmt: skip
        answered.update(mine)
        if not mine:
            yield Difference(What.UNCAUSED, str(incident))
        elif len(mine) > 1 or isinstance(faults[mine[0]].fault, DropLink):
            # One outage: the incident shows one of these faults, or one end of the link, and not which.
            yield from of_incident(incident, kind={k for i in mine for k in expected(faults[i]).kind})
        else:
            one = faults[mine[0]]
            stepped = any(c.at_s > one.at_s and c.pid != one.pid for c in history.commits)
            true = dataclasses.replace(expected(one), recovered=stepped)
            yield from of_injection(history, incident, true, wall_s=one.wall_s - one.at_s)
    untold = [one for i, one in enumerate(faults) if i not in answered and not expected(one).optional]
    yield from (Difference(What.UNTOLD, true=str(one.fault)) for one in untold)


def expected(struck: Struck) -> Injection:
    """The incident that is to tell of this fault."""
    fault, pids = struck.fault, (struck.pid,) if struck.pid else ()
    nodes = (fault.node,) if isinstance(fault, LoseNode) else ()
    kinds: tuple[str, ...] = ("exit", "hang", "lost", "unreachable", "comm")
    within_s, optional = HANG_S, True
    if isinstance(fault, Kill | Fail):
        kinds, within_s, optional = ("exit",), 5.0, False
    elif isinstance(fault, Stop):
        kinds, optional = ("hang",), fault.for_s is not None
    elif isinstance(fault, LoseNode):
        kinds, within_s, optional = ("lost", "unreachable"), LEASE_S, False
    return Injection(kinds, pids, nodes, struck.at_s, within_s, optional=optional)
