"""When checkpoints, and snapshots in memory, are due: decided from measurements, without a clock or other ranks."""

from __future__ import annotations

import msgspec

from elastic.checkpoint import interval
from elastic.checkpoint.interval import IntervalPlan, IntervalRule, Measured

BUFFERS = 2
"""Copies into fresh memory, or into a new layout, before all are like those that follow."""

OUTLIER, LEAST_OUTLIER_S = 3.0, 0.01
"""A copy counts at most as this many times the average, and this much more: a machine that stood still for a minute is
no reason to take snapshots seldom from then on."""


class SnapshotCost:
    """One per process. `own_us` is exchanged between the ranks; what is `exchanged` is the largest of all."""

    def __init__(self) -> None:
        self._own_s: float | None = None
        self._warm = False
        """Whether that is of copies into already used memory."""
        self._cold = BUFFERS
        """Number of copies until all buffers of this generation have been used."""
        self._group_s = 0.0
        """The largest of all ranks as of the last exchange; 0: not known."""
        self.copies = 0
        """Number of copies that were measured."""

    def enter(self) -> None:
        """A generation begins: its ranks may be others, and this rank's part of the state as well."""
        self._group_s = 0.0
        self._cold = BUFFERS

    def add(self, seconds: float) -> None:
        """One more copy was measured. Those into fresh memory count only until there is another."""
        self.copies += 1
        cold, own_s = self._cold > 0, self._own_s
        self._cold -= cold
        if own_s is not None and self._warm and not cold:
            self._own_s = 0.7 * own_s + 0.3 * min(seconds, OUTLIER * own_s + LEAST_OUTLIER_S)
        elif not (self._warm and cold):
            self._own_s, self._warm = seconds if own_s is None else min(own_s, seconds), not cold

    @property
    def own_us(self) -> int:
        """This rank's, of copies into already used memory, in microseconds; 0: none was measured."""
        return round(1e6 * self._own_s) if self._own_s is not None and self._warm else 0

    def exchanged(self, group_us: int) -> None:
        """`group_us`: the largest `own_us` of all ranks."""
        self._group_s = 1e-6 * group_us

    @property
    def warm(self) -> bool:
        """Whether `seconds` is of copies into already used memory."""
        return self._warm or self._group_s > 0

    @property
    def seconds(self) -> float | None:
        """None: none was measured."""
        if self._group_s and not self._warm:
            return self._group_s
        return None if self._own_s is None else max(self._own_s, self._group_s)


class SnapshotPolicy:
    """One per process: what is due at which step, as far as this rank knows. `now_s`: of a monotonic clock."""

    def __init__(self, rule: IntervalRule | None, *, snapshots: bool, now_s: float) -> None:
        self.rule = rule
        self.cost = SnapshotCost()
        self.plan = IntervalPlan()
        """As the ranks have agreed."""
        self.asked = False
        """A checkpoint was requested, and none was begun since."""
        self.skipped = 0
        """Number of checkpoints so far that were due and not taken."""
        self.kept_s = now_s
        """When the newest snapshot was begun."""
        self._snapshots = snapshots
        self._began_s = self._saved_s = now_s
        self._entered = 0
        """The step at which the generation began."""
        self._marked = (0, now_s)
        self._step_s = 0.0
        self._generations = 0
        self._late = False
        """A checkpoint was due and was not taken, and none was begun since."""

    def enter(self, step: int, now_s: float) -> None:
        """A generation begins at `step`."""
        self.cost.enter()
        self._generations += 1
        self._late = False
        self._entered, self._marked = step, (step, now_s)
        first = interval.first_plan(self.rule, step, snapshots=self._snapshots)
        # After two steps the step time is known well enough to plan with it; after one, what the turn does once it has
        # committed, such as an evaluation, is not in it.
        self.plan = msgspec.structs.replace(first, agree_at=step + 2)

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether a checkpoint is due at `step`, and whether any snapshot is."""
        save = step == self.plan.save_at
        return save, save or step == self.plan.keep_at

    def next_plan(self, step: int, now_s: float, durable_s: float) -> IntervalPlan:
        """The plan after `step`, at which the ranks exchange theirs, as far as it is this rank's to make."""
        (save, take), (marked_step, marked_s) = self.due(step), self._marked
        if step > marked_step:
            self._step_s = (now_s - marked_s) / (step - marked_step)
        self._marked = step, now_s
        ahead = max(1, round(interval.AGREE_EVERY_S / max(self._step_s, 1e-6)))
        plan = IntervalPlan()
        if self.rule is not None:
            plan = interval.next_plan(
                self.rule,
                self.measured(now_s, durable_s),
                step=step,
                step_s=self._step_s,
                since_save_s=0.0 if save else now_s - self._saved_s,
                asked=self.asked and not save,
            )
        agree_at = plan.agree_at or step + min(ahead, interval.FARTHEST_AGREEMENT_STEPS)
        plan = msgspec.structs.replace(plan, agree_at=step + 1 if step == self._entered + 1 else agree_at)
        if not self._snapshots:
            return plan
        every_s = interval.snapshot_interval_s(self.cost.seconds, warm=self.cost.warm)
        since_s = 0.0 if take else now_s - self.kept_s
        return interval.with_snapshot(plan, every_s, step=step, step_s=self._step_s, since_s=since_s)

    def took(self, now_s: float, *, save: bool) -> None:
        """All ranks take the snapshot that is due."""
        self.kept_s = now_s
        if save:
            self._saved_s, self.asked, self._late = now_s, False, False

    def passed(self, *, save: bool) -> None:
        """They do not, as one of them cannot: it stays due, and is looked at again at the next exchange."""
        fixed = self.rule is not None and self.rule.every_steps > 0
        self.skipped += save and (fixed or not self._late)  # the previous one is still being written
        self._late = self._late or save

    def measured(self, now_s: float, durable_s: float) -> Measured:
        return Measured(
            cost_s=self.cost.seconds,
            durable_s=durable_s,
            failures=max(0, self._generations - 1),
            running_s=now_s - self._began_s,
        )
