"""Which worker is hung, by the evidence that its own host can see. Pure.

A rank that has handed over everything it owes to the step's all-reduce (`Doing.EXCHANGING`) waits for others and
is innocent however long it takes: whoever keeps it waiting is found by the agent of *its* host. So each agent
judges only its own workers, and no two of them need to agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from .beat import Beat, Doing
from .spec import Hang

STOPPED_STATE = "T"
"""The process state that proves a worker cannot move: stopped by a signal. Not 't': a debugger, or a tool that reads
its stack, holds it for a moment."""

WITH_OTHERS = frozenset({Doing.EXCHANGING, Doing.SYNCING})
"""In a group, waiting for other ranks."""

INNOCENT = frozenset({Doing.WAITING, Doing.EXCHANGING, Doing.FORMING, Doing.SYNCING, Doing.DONE})


@dataclass(frozen=True, slots=True)
class Sick:
    """This worker is to be replaced."""

    evidence: str


def patience_s(beat: Beat, rules: Hang) -> float:
    """How long a worker may go without a sign of progress: some of its own step times, between floor and ceiling."""
    if beat.step_s <= 0:
        return rules.ceiling_s  # nothing known yet: imports, compilation, the first step
    return min(rules.ceiling_s, max(rules.floor_s, rules.factor * beat.step_s))


def judge(beat: Beat, process_state: str, rules: Hang, now_s: float) -> Sick | None:
    """`process_state`: the letter of /proc/PID/stat. Returns the evidence against the worker, or None."""
    silent_s = now_s - beat.beat_at_s
    if process_state == STOPPED_STATE and silent_s >= min(rules.floor_s, patience_s(beat, rules)):
        return Sick(f"process is stopped (state {process_state}) and silent for {silent_s:.1f} s")
    if beat.doing in INNOCENT or now_s < beat.quiet_until_s:
        return None
    patience = patience_s(beat, rules)
    if silent_s < patience:
        return None
    state = " in uninterruptible I/O (state D)" if process_state == "D" else ""
    return Sick(
        f"no progress for {silent_s:.1f} s while {beat.doing.name.lower()} at step {beat.step}{state}; "
        f"its patience is {patience:.1f} s (step time {beat.step_s:.3f} s)"
    )


def waits_too_long(beat: Beat, limit_s: float, now_s: float) -> str:
    """The evidence that it has waited for other ranks beyond `limit_s`, the group's own time-out; '' if not. It is not
    to blame, but the group is stuck: gloo ends that by itself, NCCL only where its watchdog is let."""
    waited_s = now_s - beat.beat_at_s
    if beat.doing not in WITH_OTHERS or waited_s < limit_s or now_s < beat.quiet_until_s:
        return ""
    return f"has waited for other ranks for {waited_s:.0f} s ({beat.doing.name.lower()} at step {beat.step})"
