"""What a case was to come to, from what its ranks and its agents wrote down. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .grammar import ALL, Case, refusable

Prints = Mapping[int, Mapping[str, str]]
"""rank -> name of a tensor or value -> its fingerprint."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The same script, without elasticd and undisturbed."""

    finals: Prints = field(default_factory=dict)
    error: str = ""
    """The last lines of what it wrote, where it ended with an error."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    kind: str
    steps_lost: int | None
    restored_from: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run under elasticd."""

    phase: str
    """succeeded, failed; empty: not over in time."""
    reason: str
    restarts: int
    """Failures charged to the job's budget."""
    generations: int
    incidents: Sequence[Incident]
    lines: Mapping[int, Sequence[Mapping[str, Any]]]
    """pid -> what that process wrote down, in order."""
    finals: Prints
    tracebacks: Sequence[str] = ()
    """Of processes that were not killed by the case: the first lines of each."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    right: bool
    said: str
    lost: int | None = None


def judge(case: Case, reference: Reference, record: Record | None) -> Verdict:
    """`record`: None where the script was refused without any failure."""
    if reference.error:
        return _refused(case, reference.error)
    assert record is not None
    wrong: list[str] = []
    lives = [Life.of(pid, lines) for pid, lines in record.lines.items()]
    if record.phase != "succeeded":
        wrong.append(f"the job is {record.phase or 'not over in time'}: {_last_line(record.reason)}")
    elif different := _different(reference.finals, record.finals, case.world_size):
        wrong.append(different)
    resumes = resumed(lives)
    lost = sum(resume.lost for resume in resumes)
    if case.place.region == "none":
        if record.incidents or record.restarts:
            wrong.append(f"nothing was killed, but: {_listed(record.incidents)}; {record.restarts} failures charged")
    else:
        wrong += _after_kills(case, record, lives, resumes)
    saw = f"{lost} steps done again" if lost else "exact"
    return Verdict(right=not wrong, said="; ".join(wrong) or saw, lost=lost)


def cause(logs: Sequence[str]) -> str:
    """Of the logs of failed ranks the one that says why: not of a rank that only lost its connection to another."""
    told = [log for log in logs if log.strip()]
    return next((log for log in told if "Connection" not in _error(log)), (*told, "no word")[0])


def _error(log: str) -> str:
    """What stands after the last frame of its traceback: the messages of some errors have several lines."""
    lines = log.strip().splitlines()
    last = max((n for n, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last + 1 :])


def _refused(case: Case, error: str) -> Verdict:
    why = refusable(case.script)
    last = _last_line(error)
    clear = error.count("/elastic/worker/") > 0 and len(last) > 60
    if why and clear:
        return Verdict(right=True, said=f"refused: {last}")
    return Verdict(right=False, said=f"an ordinary script ended with: {last}")


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one process did."""

    pid: int
    entered: Mapping[int, int]
    """generation -> steps that were committed when it entered `train`."""
    committed: Mapping[int, int]
    """generation -> steps that were committed when it left."""
    struck: int | None
    """The generation in which it was killed."""

    @staticmethod
    def of(pid: int, lines: Sequence[Mapping[str, Any]]) -> Life:
        return Life(
            pid=pid,
            entered={line["generation"]: line["entered"] for line in lines if "entered" in line},
            committed={line["generation"]: line["step"] for line in lines if "step" in line and "struck" not in line},
            struck=next((line["generation"] for line in lines if "struck" in line), None),
        )

    def took_part_before(self, generation: int) -> bool:
        return any(earlier < generation for earlier in self.entered)

    def done_before(self, generation: int) -> int:
        """Steps that its state had, committed by itself or received."""
        known = (*self.entered.items(), *self.committed.items())
        return max((step for earlier, step in known if earlier < generation), default=0)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """How a generation began."""

    generation: int
    step: int
    done: int
    """Steps known to the surviving ranks; where none survived, to those that were killed."""
    survived: bool
    """A rank survived."""

    @property
    def lost(self) -> int:
        return max(0, self.done - self.step)


def resumed(lives: Sequence[Life]) -> list[Resume]:
    """Each generation but the first. A step that only a killed rank had committed is lost with it, unless all were."""
    found = []
    for generation in sorted({g for life in lives for g in life.entered})[1:]:
        before = [life for life in lives if life.took_part_before(generation)]
        living = [life for life in before if life.struck is None or life.struck >= generation]
        found.append(
            Resume(
                generation=generation,
                step=min(life.entered[generation] for life in lives if generation in life.entered),
                done=max((life.done_before(generation) for life in living or before), default=0),
                survived=bool(living),
            )
        )
    return found


def _after_kills(case: Case, record: Record, lives: Sequence[Life], resumes: Sequence[Resume]) -> list[str]:
    struck = [life.struck for life in lives if life.struck is not None]
    rounds = 1 if case.place.again == "none" else 2
    expected = case.world_size if case.place.rank == ALL else rounds
    if len(struck) != expected:
        return [f"{len(struck)} of {expected} kills struck"]
    wrong = []
    spare = expected - rounds  # ranks that are killed together may be noticed one after the other
    # A kill before every rank has stepped again belongs to the recovery that is under way.
    merged = sum(g > 1 and any(g in life.entered and g not in life.committed for life in lives) for g in struck)
    if not rounds - merged <= len(record.incidents) <= rounds + spare:
        wrong.append(f"{len(record.incidents)} incidents for {rounds} kills: {_listed(record.incidents)}")
    elif any(incident.steps_lost is None for incident in record.incidents):
        wrong.append(f"an incident does not say how many steps were lost: {_listed(record.incidents)}")
    else:
        said, lost = sum(i.steps_lost or 0 for i in record.incidents), sum(resume.lost for resume in resumes)
        unknown = sum(not resume.survived for resume in resumes)  # a last commit that nobody has written down
        if not lost <= said <= lost + unknown:
            wrong.append(f"the incidents say {said} steps lost, {lost} were done again: {_listed(record.incidents)}")
    if not rounds + 1 <= record.generations <= rounds + 1 + spare:
        wrong.append(f"{record.generations} generations for {rounds} kills")
    if not rounds <= record.restarts <= rounds + spare:
        wrong.append(f"{record.restarts} failures charged for {rounds} kills")
    for resume in resumes:
        if resume.step == 0 and resume.done >= 2:
            wrong.append(f"all state was lost: begun again from step 0 after {resume.done} steps")
    for life in lives:
        if (
            life.struck is None
            and record.phase == "succeeded"
            and max(life.entered, default=0) < max(r.generation for r in resumes)
        ):
            wrong.append(f"a rank that was not killed lost its process, {life.pid}")
    if record.tracebacks:
        wrong.append(f"a traceback in the log of a rank that was not killed: {record.tracebacks[0]}")
    return wrong


def _different(want: Prints, got: Prints, world_size: int) -> str:
    missing = [rank for rank in range(world_size) if rank not in got]
    if missing:
        return f"ranks {missing} did not get to the end"
    for rank in range(world_size):
        differ = [n for n in {**want[rank], **got[rank]} if want[rank].get(n) != got[rank].get(n)]
        if differ:
            name = differ[0]
            return (
                f"rank {rank}: {len(differ)} of {len(want[rank])} parts differ from the undisturbed run's, "
                f"first {name}: {got[rank].get(name)}, undisturbed {want[rank].get(name)} ({', '.join(differ[:12])})"
            )
    return ""


def _listed(incidents: Sequence[Incident]) -> str:
    return ", ".join(f"{i.kind} ({_last_line(i.detail)}; lost {i.steps_lost}, {i.restored_from})" for i in incidents)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:200] if text.strip() else ""
