"""The goodput ledger of a job: each second of each rank is in exactly one bucket. Pure.

Time is counted in whole milliseconds of one rank, so the sum over the buckets equals the time that has passed, exactly.
What follows the newest commit is `open`: it was training if the step is committed, and lost if the generation fails.

The words are those of Google's ML Goodput Measurement: goodput is the share of time in which steps are made that are
kept, badput is all other time, by cause.
"""

from __future__ import annotations

import bisect
import enum

import msgspec

from elastic.contract.numbers import Int
from elastic.contract.structs import replace


class Bucket(enum.StrEnum):
    STEPPING = "stepping"  # steps that were committed, and not repeated: goodput
    CHECKPOINT = "checkpoint"  # training stood still for a snapshot
    DETECT = "detect"  # from the last commit until the failure was noticed
    ABORT = "abort"  # until the ranks have left their process group
    FORM = "form"  # until the next process group stands: decision, replacements, rendezvous
    SYNC = "sync"  # until every rank has the state
    REDO = "redo"  # steps that were committed before, and lost
    WAITING = "waiting"  # for nodes, or for an agent that runs
    SETUP = "setup"  # before the job's first step: imports, setup, the first process group
    IDLE = "idle"  # this rank has finished, the job has not


STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STALL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histograms."""

UNCOUNTED_MS = 60_000
"""A script without `elastic` commits no steps: its time counts as stepping once it has run for so long."""


class Seen(msgspec.Struct, frozen=True):
    """The job at one instant, as an agent sees it."""

    bucket: Bucket
    """STEPPING within a step, whether or not it will be committed."""
    ranks: int
    """Ranks of the generation; before the first one those that the job needs at least."""
    step: int = 0
    """Newest committed step."""
    broken: bool = False
    """The generation has failed."""
    counted: bool = True
    """The script commits its steps (it calls `elastic.run`)."""


class Spread(msgspec.Struct, frozen=True):
    """A histogram: how many durations are at most each bound and above the one before; the last count is above all."""

    counts: tuple[Int, ...] = ()
    sum_ms: Int = 0

    def with_more(self, bounds: tuple[float, ...], each_s: float, count: int, sum_ms: int) -> Spread:
        counts = [*self.counts, *[0] * (len(bounds) + 1 - len(self.counts))]
        counts[bisect.bisect_left(bounds, each_s)] += count
        return Spread(tuple(counts), self.sum_ms + sum_ms)


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable; `advance` makes the next one."""

    until_ms: Int
    """Time of day up to which all is accounted for."""
    wall_ms: Int = 0
    """Time accounted for, whatever the number of ranks."""
    ranks_ms: dict[str, Int] = {}
    """Bucket -> milliseconds, summed over the ranks. None ever decreases, but for `stepping` by `plain_ms`."""
    open_ms: Int = 0
    """The same, of the step under way."""
    stall_ms: Int = 0
    """How much of `open_ms` was spent on a snapshot."""
    plain_ms: Int = 0
    """How much of `stepping` was booked while the script was not known to call `elastic.run`."""
    step: Int = 0
    """The highest step ever committed."""
    steps: Spread = Spread()
    """Durations of committed steps, without what snapshots took; several between two looks count with their mean."""
    stalls: Spread = Spread()
    """What snapshots took."""
    by: str = ""
    """Incarnation of the agent that has written it."""

    @property
    def total_ms(self) -> int:
        return sum(self.ranks_ms.values()) + self.open_ms


def advance(ledger: Ledger, before: Seen, after: Seen, now_ms: int, stall_ms: int = 0) -> Ledger:
    """`ledger` up to `now_ms`. The job was as in `before` until then, and is as in `after` from then on.

    `stall_ms`: for how long each rank stood still for a snapshot since the last call. A clock that goes back adds
    nothing.
    """
    passed_ms = max(0, now_ms - ledger.until_ms)
    spent_ms = passed_ms * before.ranks
    stepping = before.bucket is Bucket.STEPPING
    ledger = replace(
        ledger,
        until_ms=ledger.until_ms + passed_ms,
        wall_ms=ledger.wall_ms + passed_ms,
        step=max(ledger.step, before.step),
        open_ms=ledger.open_ms + (spent_ms if stepping else 0),
        stall_ms=ledger.stall_ms + (max(0, stall_ms) * before.ranks if stepping else 0),
    )
    if not stepping:
        ledger = _booked(ledger, before.bucket, spent_ms)
    return _settled(ledger, before, after)


def _settled(ledger: Ledger, before: Seen, after: Seen) -> Ledger:
    """With the time since the last commit in its bucket, if it is known now which one that is."""
    if before.counted != after.counted:
        return _called(ledger) if after.counted else _uncounted(ledger)
    if not before.counted:
        ends = after.bucket is not Bucket.STEPPING or ledger.open_ms >= UNCOUNTED_MS * max(1, before.ranks)
        return _uncounted(ledger) if ends else ledger
    if before.bucket is Bucket.STEPPING and after.step > before.step:
        ledger = _committed(ledger, before.step, after.step, max(1, before.ranks))
    if after.bucket is Bucket.STEPPING:
        return ledger
    return _close(ledger, Bucket.DETECT if after.broken else after.bucket)


def _uncounted(ledger: Ledger) -> Ledger:
    """What is open is stepping, unless the script turns out to commit its steps."""
    return _close(replace(ledger, plain_ms=ledger.plain_ms + ledger.open_ms), Bucket.STEPPING)


def _called(ledger: Ledger) -> Ledger:
    """The script calls `elastic.run` only now: until here it was importing, also in generations that failed."""
    stepping_ms = ledger.ranks_ms.get(Bucket.STEPPING, 0)
    plain_ms = min(ledger.plain_ms, stepping_ms)
    ranks_ms = {name: spent_ms for name, spent_ms in ledger.ranks_ms.items() if name != Bucket.STEPPING}
    called = replace(ledger, ranks_ms=ranks_ms, plain_ms=0, open_ms=0, stall_ms=0)
    return _booked(_booked(called, Bucket.STEPPING, stepping_ms - plain_ms), Bucket.SETUP, plain_ms + ledger.open_ms)


def _committed(ledger: Ledger, before: int, after: int, ranks: int) -> Ledger:
    """Steps `before` + 1 to `after` are committed; those up to `ledger.step` had been committed before."""
    stall_ms = min(ledger.stall_ms, ledger.open_ms)
    trained_ms = ledger.open_ms - stall_ms
    again = min(max(0, min(after, ledger.step) - before), after - before)
    redo_ms = trained_ms * again // (after - before)
    ledger = _booked(ledger, Bucket.CHECKPOINT, stall_ms)
    ledger = _booked(ledger, Bucket.REDO, redo_ms)
    ledger = _booked(ledger, Bucket.STEPPING, trained_ms - redo_ms)
    each_s, stalls = trained_ms / ranks / (after - before) / 1000, ledger.stalls
    if stall_ms >= ranks:
        stalls = stalls.with_more(STALL_S, stall_ms / ranks / 1000, 1, stall_ms // ranks)
    steps = ledger.steps.with_more(STEP_S, each_s, after - before, trained_ms // ranks)
    return replace(ledger, open_ms=0, stall_ms=0, step=max(ledger.step, after), steps=steps, stalls=stalls)


def _close(ledger: Ledger, bucket: Bucket) -> Ledger:
    return replace(_booked(ledger, bucket, ledger.open_ms), open_ms=0, stall_ms=0)


def _booked(ledger: Ledger, bucket: Bucket, spent_ms: int) -> Ledger:
    if spent_ms <= 0:
        return ledger
    booked = ledger.ranks_ms
    return replace(ledger, ranks_ms={**booked, bucket.value: booked.get(bucket.value, 0) + spent_ms})


def shares(ledger: Ledger) -> dict[str, float]:
    """Bucket -> its share of all time, in the order of `Bucket`, those that are not empty; the sum is 1. The step under
    way counts as stepping. Empty if no time has passed."""
    total = ledger.total_ms
    if not total:
        return {}
    times = dict(ledger.ranks_ms)
    times[Bucket.STEPPING] = times.get(Bucket.STEPPING, 0) + ledger.open_ms
    return {bucket.value: times[bucket] / total for bucket in Bucket if times.get(bucket)}
