"""Where the time of a step goes on this node's ranks, from the marks on their beat pages.

The marks are taken anyway, to find hangs; here they are only added up. On a GPU the host runs ahead of the device:
there the times are those between events in the stream, which are polled and never waited for. Until such a step has
passed only what holds up the host itself is known, data and snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from elastic.contract.records.job_records import RankRow
from elastic.contract.step_parts import WINDOWS, SlowRank, StepParts, slow_ranks
from elastic.contract.worker.beat import Beat, Doing

STEPS = 3
"""A window has this many steps of each rank at least, so that where it begins within a step matters little."""


def parts(before: Beat, after: Beat, seconds: float, *, gpu: bool) -> StepParts | None:
    """The steps between two looks at one worker, `seconds` apart; None if there was none, or they are of two
    generations."""
    steps = after.step - before.step
    if steps <= 0 or not (before.settled and after.settled and before.generation == after.generation):
        return None

    def each(*doings: Doing) -> float:
        return sum(after.spent_s[doing] - before.spent_s[doing] for doing in doings) / steps

    device_steps = after.device_steps - before.device_steps
    measured = not gpu or device_steps > 0

    def spent(doing: Doing) -> float:
        if gpu:
            return (after.device_s[doing] - before.device_s[doing]) / device_steps
        return each(doing)

    data_s, stall_s = (after.data_s - before.data_s) / steps, (after.stall_s - before.stall_s) / steps
    return StepParts(
        step_s=round(seconds / steps, 6),
        data_s=_at_least_0(data_s),
        compute_s=_at_least_0(spent(Doing.COMPUTING) - data_s) if measured else None,
        collectives_s=_at_least_0(spent(Doing.EXCHANGING)) if measured else None,
        optimizer_s=_at_least_0(spent(Doing.APPLYING) - stall_s) if measured else None,
        snapshot_s=_at_least_0(each(Doing.SAVING) + stall_s),
    )


def _at_least_0(seconds: float) -> float:
    return round(max(0.0, seconds), 6)


def own_s(of: StepParts) -> float | None:
    """Time of a step in which the other ranks wait for this one; None: not measured."""
    if of.compute_s is None or of.optimizer_s is None:
        return None
    return of.data_s + of.compute_s + of.optimizer_s


class StepTimes:
    """Call `look` with the pages of all workers of this node."""

    def __init__(self, node: str, window_s: float, *, gpu: bool) -> None:
        """`window_s`: seconds of a window, at least."""
        self._node, self._window_s = node, window_s
        self._gpu = gpu
        self._began_s = 0.0
        self._begin: dict[int, Beat] = {}
        self._known: dict[int, StepParts] = {}
        """By worker id, of the newest window."""
        self._seen: dict[int, int] = {}
        """By worker id: its step at the last look."""
        self._windows: list[dict[int, float]] = []
        self.slow: tuple[SlowRank, ...] = ()

    def look(self, beats: Mapping[int, Beat], now_s: float) -> None:
        stepping = {worker_id: beat for worker_id, beat in beats.items() if beat.settled}
        stepped = any(beat.step > self._seen.get(worker_id, beat.step) for worker_id, beat in stepping.items())
        self._seen = {worker_id: beat.step for worker_id, beat in stepping.items()}
        if self._of(stepping.values()) != self._of(self._begin.values()) or stepping.keys() != self._begin.keys():
            self._begin, self._began_s, self._windows, self._known, self.slow = stepping, now_s, [], {}, ()
            return
        seconds = now_s - self._began_s
        # A window ends with a step: what has passed since then belongs to one that is not done, or stands still.
        few = any(beat.step - self._begin[worker_id].step < STEPS for worker_id, beat in stepping.items())
        if seconds < self._window_s or few or not stepped:
            return
        found = {w: parts(self._begin[w], beat, seconds, gpu=self._gpu) for w, beat in stepping.items()}
        self._known = {worker_id: each for worker_id, each in found.items() if each is not None}
        window = {stepping[w].rank: own for w, each in self._known.items() if (own := own_s(each)) is not None}
        self._windows = [*self._windows[1 - WINDOWS :], window]
        self.slow = tuple(SlowRank(rank=r, node=self._node, ratio=ratio) for r, ratio in slow_ranks(self._windows))
        self._begin, self._began_s = stepping, now_s

    @staticmethod
    def _of(beats: Iterable[Beat]) -> set[int]:
        return {beat.generation for beat in beats}

    def own_s(self, rank: int) -> tuple[float, ...]:
        """A rank's own time of a step in the newest windows, the newest last."""
        return tuple(round(window[rank], 6) for window in self._windows if rank in window)

    def with_parts(self, rows: tuple[RankRow, ...]) -> tuple[RankRow, ...]:
        return tuple(msgspec.structs.replace(row, parts=self._known.get(row.incarnation)) for row in rows)
