"""Which worker is hung. Pure.

Each agent judges only its own workers, by what its host shows: the beat page, the process state, the stack. A worker
that waits for other ranks is exempt, and a worker for which no rank waits holds nothing up. So a worker is hung only if
another rank of its generation has got further (`RankWait`) and has waited for longer than this worker's patience. The
rank that has got furthest is never hung by this rule, so the ranks of a generation never all are: whatever they all do
together, a save, a compilation or an evaluation, none of them waits.

What elastic does itself (forming, receiving state, saving, all before a generation's first commit) has no usual
duration. There the patience is `hang.ceiling_s`.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from elastic.contract.job.spec import Hang
from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.worker.beat import WITH_OTHERS, Beat, Doing

STOPPED_STATE = "T"
"""The process state that proves that a worker cannot run: stopped by a signal. Not 't': a debugger, or a tool that
dumps its stack, traces it for a moment."""

IN_EXCHANGE = frozenset({Doing.EXCHANGING, Doing.SYNCING, Doing.FINISHING})
"""In a collective that can complete on another rank and not on this one."""

AS_SLOW_AS_OTHERS = 2.0
"""A rank may take this many times as long as the rank that waits for it took."""

LONGER_THERE = 4.0
"""See `patience_there_s`."""

COPIES_S = 10.0
"""A copy of state that completes no further piece for this long has stalled."""

Position = tuple[int, int, int]
"""(generation, step, place within the step): how far a rank has got. Comparable between ranks of a job."""

FORMING, SYNCING = -2, -1
"""In place of the step, before it."""
SETTING_UP = -1
"""Place within SYNCING: in a `setup` that runs in the formed group."""
_LAST = 2**31

FARTHEST: Position = (2**62, 0, 0)
"""Beyond any position of a worker."""


def position(beat: Beat, in_collective: bool = False) -> Position:
    """`in_collective`: its stack shows it in a collective of the script's own, which the beat page does not show."""
    if beat.doing is Doing.FORMING:
        return beat.generation, FORMING, 0
    if beat.doing in (Doing.STARTING, Doing.SYNCING):
        return beat.generation, SYNCING, SETTING_UP if beat.doing is Doing.STARTING else 0
    if beat.doing in (Doing.FINISHING, Doing.DONE):
        return beat.generation, beat.step, _LAST + (beat.doing is Doing.DONE)
    return beat.generation, beat.step, 2 * beat.exchanges + in_collective


class RankWait(msgspec.Struct, frozen=True):
    """A rank that waits for others, and is not stopped itself."""

    position: Position
    since_s: float
    """Instant on this host's monotonic clock."""
    gap_s: float = 0.0
    """Its own longest time without a sign of progress on the way there."""

    @property
    def at_end(self) -> bool:
        """`train` has returned there."""
        return self.position[2] >= _LAST


class Unhealthy(msgspec.Struct, frozen=True):
    """This worker is to be replaced."""

    evidence: Reason
    certain: bool = True
    """False: its stack may show that it waits for other ranks, and then it is exempt."""


def patience_s(beat: Beat, rules: Hang) -> float:
    """Seconds that a worker may go without a sign of progress: `factor` step times of its own, in [floor, ceiling]."""
    if beat.step_s <= 0 or not beat.settled or beat.left_s or beat.doing is Doing.SAVING:
        return rules.ceiling_s  # opening data, compilation, leaving `train`, copying a snapshot: no usual duration
    return min(rules.ceiling_s, max(rules.floor_s, rules.factor * beat.step_s))


def patience_there_s(beat: Beat, rules: Hang, times: int) -> float:
    """The patience of a worker at a place in `train` where its rank was found to be hung `times` times before. If its
    replacement takes long there, too, the script most likely does: it has four times as long, up to the ceiling."""
    return min(rules.ceiling_s, patience_s(beat, rules) * LONGER_THERE ** min(times, 16))


def judge(
    beat: Beat,
    process_state: str,
    waits: Collection[RankWait],
    rules: Hang,
    now_s: float,
    *,
    alone: bool = False,
    in_collective: bool = False,
    all_ahead: bool = False,
) -> Unhealthy | None:
    """The evidence that a worker is hung, or None.

    `process_state`: the letter in /proc/PID/stat. `waits`: the other ranks that wait, as far as this agent has learnt.
    `alone`: the job has no other rank. `all_ahead`: every other rank is known to have committed this rank's step.
    """
    silent_s = now_s - beat.beat_at_s
    if alone:
        return _judge_alone(beat, process_state, rules, now_s)
    here = position(beat, in_collective)
    if process_state == STOPPED_STATE:
        if silent_s < min(rules.floor_s, patience_s(beat, rules)):
            return None
        # Without a generation the worker holds no state: replacing it cannot lose the last copy.
        held_up = not beat.generation or any(wait.position >= here for wait in waits)
        return stopped(silent_s) if held_up else None
    if now_s < beat.quiet_until_s:
        return None
    ahead = [wait for wait in waits if wait.position > here]
    if not ahead or beat.doing in WITH_OTHERS - IN_EXCHANGE:
        return None
    first = min(ahead, key=lambda wait: wait.since_s)
    patience = rules.ceiling_s if all(wait.at_end for wait in ahead) else patience_s(beat, rules)
    patience = max(patience, AS_SLOW_AS_OTHERS * first.gap_s)
    held_s = now_s - max(beat.beat_at_s, first.since_s)
    if held_s < patience:
        return None
    if beat.pulse_s and now_s - beat.pulse_s >= patience:
        return Unhealthy(_evidence(beat, process_state, silent_s, patience, reason(Code.DEAF)))
    who = "every other rank" if all_ahead else "another rank"
    behind = reason(Code.OTHERS_WAIT, who=who, for_s=round(now_s - first.since_s, 1))
    evidence = _evidence(beat, process_state, silent_s, patience, behind)
    # Not in a collective of the script's own: another rank may have skipped it, and then no rank is hung.
    alone_behind = all_ahead and beat.doing in IN_EXCHANGE
    return Unhealthy(evidence, certain=alone_behind and held_s >= rules.ceiling_s)


def _judge_alone(beat: Beat, process_state: str, rules: Hang, now_s: float) -> Unhealthy | None:
    """The only rank of a job holds up no other, and its state is lost with it: its patience is always the ceiling."""
    silent_s = now_s - beat.beat_at_s
    if silent_s < rules.ceiling_s:
        return None
    if process_state == STOPPED_STATE:
        return stopped(silent_s)
    if beat.doing in WITH_OTHERS - IN_EXCHANGE or now_s < beat.quiet_until_s:
        return None
    return Unhealthy(_evidence(beat, process_state, silent_s, rules.ceiling_s))


def stopped(silent_s: float) -> Unhealthy:
    return Unhealthy(reason(Code.STOPPED, reason(Code.SILENT, for_s=round(silent_s, 1))))


def _evidence(beat: Beat, process_state: str, silent_s: float, patience_s: float, *more: Reason) -> Reason:
    io = reason(Code.IN_IO) if process_state == "D" else ""
    patience = reason(Code.PATIENCE, patience_s=round(patience_s, 1))
    doing, for_s, step_s = beat.doing.name.lower(), round(silent_s, 1), round(beat.step_s, 3)
    return reason(Code.NO_PROGRESS, io, *more, patience, for_s=for_s, doing=doing, step=beat.step, step_s=step_s)


def busy(beat: Beat, rules: Hang, now_s: float) -> bool:
    """Whether a worker that was told to abort cannot react yet but is healthy: it has declared a span without steps,
    copies state (with a sign of progress every COPIES_S), is in the script's own code for no longer than it has
    patience, or has left the group and runs what the script does then: it joins loaders, say, for a while."""
    silent_s = now_s - beat.beat_at_s
    if now_s < beat.quiet_until_s:
        return True
    if beat.left_s:
        return now_s - beat.left_s < rules.ceiling_s
    if beat.doing in (Doing.SAVING, Doing.SYNCING, Doing.APPLYING):
        return silent_s < COPIES_S
    return beat.doing in (Doing.COMPUTING, Doing.STARTING) and silent_s < patience_s(beat, rules)


def waits_too_long(slot: int, beat: Beat, limit_s: float, now_s: float) -> Reason | None:
    """The evidence that it has waited for other ranks beyond `limit_s`, the group's own timeout; None: it has not. The
    worker is not hung, but the group is stuck: gloo ends that by itself, NCCL only where its watchdog is enabled."""
    waited_s = now_s - beat.beat_at_s
    if beat.doing not in IN_EXCHANGE or waited_s < limit_s or now_s < beat.quiet_until_s:
        return None
    return reason(Code.WAITED, slot=slot, for_s=round(waited_s), doing=beat.doing.name.lower(), step=beat.step)
