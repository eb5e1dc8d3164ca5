"""Snapshots on the worker's side: when one is due, every rank copies its part into an arena of its agent's.

Some are written to disk, as checkpoints; the others, more often, stay in the agents' memory. Together the ranks of a
node keep all of the state there, so any node that lives has it.

Ranks must agree on the step without a word per step. So about once a second, and at each snapshot, they exchange a few
numbers: rank 0's plan (the next steps to save, to keep and to talk at), and whether anybody lacks a buffer.

A large copy runs beside the next forward and backward. It is completed, and only then taken for whole, before anything
changes what is copied: by `settle`, which the optimizer's guard calls before each step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..checkpoint.layout import file_order
from ..core import checkpoint_interval
from ..core.shares import assign_shares, beside_shares
from ..core.tensors import ALONE, Beside, Table
from . import gc_pause
from .restore import extra_of
from .session import GenerationEnded
from .state import State

FINISH_S = 60.0
"""How long the last checkpoint of a job waits for the one before it."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where this worker stands in the present generation."""

    generation: int
    rank: int
    world_size: int
    local_index: int
    local_world_size: int


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a snapshot."""

    step: int
    commit_generation: int
    share: int
    shares: int
    table: Table
    tensors: Sequence[torch.Tensor]
    """Of `table`, then of `beside`."""
    extra: dict[str, Any]
    interval: str
    """How often checkpoints are taken, in words."""
    beside: Beside = ALONE
    """Other nodes' shares, which this rank keeps in memory beside its own."""
    part: int | None = None
    parts: int | None = None
    """What own share and others are of the node's whole snapshot; None: as `share` of `shares`."""
    save: bool = True
    """Have the share written to disk; False: it is for memory alone."""
    kept: str = ""
    """How often snapshots are taken for memory alone, in words."""
    skipped: int = 0
    """How many checkpoints were due and not taken, so far."""
    volatile: Collection[int] = ()
    """Indices of the tensors that may change before the next optimizer step: copied before anything queued later."""

    def own(self) -> Part:
        """Without what is kept beside the share."""
        count = len(self.table)
        volatile = frozenset(place for place in self.volatile if place < count)
        return replace(self, tensors=self.tensors[:count], beside=ALONE, part=None, parts=None, volatile=volatile)


class SnapshotBackend(Protocol):
    """Where snapshots go."""

    @property
    def durable_s(self) -> float:
        """How long the last one took until it was on disk; 0: not known."""

    def wanted(self) -> bool:
        """Whether somebody asked for a checkpoint since the last call."""

    def stops(self) -> bool:
        """Whether training is to stop at the checkpoint that was asked for."""

    def free(self) -> bool:
        """Whether there is room for one more."""

    def wait(self, limit_s: float) -> None:
        """Until there is room, or `limit_s` seconds have passed."""

    def put(self, part: Part) -> bool:
        """Copy `part`, or begin to. False: skipped."""

    @property
    def copying(self) -> bool:
        """Whether what was last put is still to be settled."""

    def settle(self) -> None:
        """Wait for the copy under way; it is a snapshot from now on. Raises RuntimeError: it failed, and is dropped."""

    @property
    def beside_s(self) -> float:
        """Seconds of a core that the copy last settled took from the steps it ran beside."""

    def leave(self) -> None:
        """As `settle`, but a copy that others would have to wait for is dropped."""

    def prepare(self, part: Part) -> None:
        """Something like `part` will be put: do now, beside the steps, what need not wait until then."""


class CheckpointScheduler:
    """One per process; `enter` for each generation, `after` for each commit."""

    def __init__(
        self, sink: SnapshotBackend, rule: checkpoint_interval.Rule | None, *, shared: bool, snapshots: bool = False
    ) -> None:
        """`rule`: of checkpoints; None: there are none. `snapshots`: keep the newest state in memory as well."""
        self._sink = sink
        self._rule = rule
        self._shared = shared
        self._snapshots = snapshots
        self._place = RankPosition(0, 0, 1, 0, 1)
        self._plan = checkpoint_interval.IntervalPlan()
        self._marked = (0, 0.0)
        self._step_s = 0.0
        self._began_s = self._saved_s = self._kept_s = time.monotonic()
        self._cost_s: float | None = None
        self._copies = 0
        """Whose cost was measured."""
        self._stall_s = 0.0
        self._unsettled = False
        self._prepared = False
        self._cut_for: tuple[Table, int, int] = ((), 0, 0)
        self._cut: tuple[int, ...] = ()
        self._beside = ALONE
        self._chosen: tuple[int, ...] = ()
        self._own: Table = ()
        self._volatile: frozenset[int] = frozenset()
        self._generations = 0
        self._saved_step = -1
        self._asked = False
        """Somebody has asked for a checkpoint, and none was begun since."""
        self.skipped = 0

    def enter(self, place: RankPosition, step: int) -> None:
        """A new generation, entered at `step`."""
        self._cut_for = ((), 0, 0)  # a standby's state may have moved to a GPU since
        self._place = place
        self._generations += 1
        self._saved_step = -1  # alike on all ranks, newcomers among them
        self._marked = (step, time.monotonic())
        first = checkpoint_interval.first_plan(self._rule, step, snapshots=self._snapshots)
        # Two steps in, the step time is known well enough to plan by it.
        self._plan = checkpoint_interval.IntervalPlan(save_at=first.save_at, keep_at=first.keep_at, agree_at=step + 2)

    def after(self, state: State, *, keep: bool = True) -> None:
        """After each commit, on every rank at the same step. Without `keep` no rank saves: this one's state is bad."""
        self.settle()  # there was no optimizer step since
        step = state.step
        if step not in (self._plan.save_at, self._plan.keep_at, self._plan.agree_at):
            return
        save = step == self._plan.save_at
        take = save or step == self._plan.keep_at
        now_s = time.monotonic()
        marked_step, marked_s = self._marked
        if step > marked_step:
            self._step_s = (now_s - marked_s) / (step - marked_step)
        self._marked = (step, now_s)
        if save:
            self._saved_s = now_s
        kept_s = self._kept_s
        if take:
            self._kept_s = now_s
        plan = self._next_plan(step, now_s, save) if self._place.rank == 0 else checkpoint_interval.IntervalPlan()
        stop = self._place.rank == 0 and self._sink.stops()
        self._plan, busy, stop = self._exchange(plan, take and not (keep and self._sink.free()), stop)
        if not take:
            self._prepare(state)
            return
        if busy:
            self.skipped += save  # the one before is still being written
            self._kept_s = kept_s  # for memory it stays due: looked at again at the next agreement
            return
        if save:
            self._asked = False
            self._saved_step = step  # agreed by all, whether or not it works out on each
        kept = self._put(state, save=save)
        if kept and save and stop:
            self.settle()
            raise GenerationEnded(f"stopped at step {step}, which is saved")

    def finish(self, state: State) -> None:
        """`train` has returned on this rank: save what it came to, unless that was just saved."""
        self.settle()
        if self._rule is None or state.step == self._saved_step:
            return
        self._sink.wait(FINISH_S)
        _, busy, _ = self._exchange(checkpoint_interval.IntervalPlan(), not self._sink.free())
        if not busy:
            self._saved_step = state.step
        if busy:
            self.skipped += 1
        else:
            self._put(state, save=True)
            self.settle()

    def settle(self) -> None:
        """The state is about to be changed: what is being copied of it is completed first.

        Raises RuntimeError when the device failed meanwhile; the snapshot before is then the newest.
        """
        if not self._unsettled:
            return
        self._unsettled = False
        began_s = time.monotonic()
        self._sink.settle()
        # Steps that lack a core are slower by as much at most: cheap to the eye, and still the price of a snapshot.
        self._stalled(self._stall_s + time.monotonic() - began_s + self._sink.beside_s)

    def leave(self) -> None:
        """The generation is over, and the next may bring another state. After the group was let go of.

        A copy under way waits for nobody by then. It is of a committed step: one by a GPU is completed like any other;
        one by the CPU is dropped unless it is complete, as the others wait for this rank. If the device has failed it
        is dropped, and whatever touches the device next says so.
        """
        self._unsettled = False
        with contextlib.suppress(RuntimeError):
            self._sink.leave()

    def describe(self) -> str:
        """The interval between checkpoints in words, for status."""
        return (
            checkpoint_interval.describe(self._rule, self._measured(time.monotonic())) if self._rule is not None else ""
        )

    def _prepare(self, state: State) -> None:
        """Once per process, two steps in: by then an optimizer has all its state."""
        if not self._prepared:
            self._prepared = True
            self._sink.prepare(self._part(state, save=True))

    def _put(self, state: State, *, save: bool) -> bool:
        self._prepared = True
        began_s = time.monotonic()
        with gc_pause.paused():
            kept = self._sink.put(self._part(state, save=save))
        self.skipped += save and not kept
        if not kept:
            return False
        self._stall_s = time.monotonic() - began_s
        if self._sink.copying:
            self._unsettled = True
        else:
            self._stalled(self._stall_s)
        return True

    def _stalled(self, stall_s: float) -> None:
        """The first one paid for fresh memory too: it counts only until there is another."""
        known_s = self._cost_s if self._copies > 1 else None
        self._cost_s = stall_s if known_s is None else 0.7 * known_s + 0.3 * stall_s
        self._copies += 1

    def _measured(self, now_s: float) -> checkpoint_interval.Measured:
        return checkpoint_interval.Measured(
            cost_s=self._cost_s,
            durable_s=self._sink.durable_s,
            failures=max(0, self._generations - 1),
            running_s=now_s - self._began_s,
        )

    def _next_plan(self, step: int, now_s: float, saving: bool) -> checkpoint_interval.IntervalPlan:
        plan = self._next_save(step, now_s, saving)
        if not self._snapshots:
            return plan
        keep_at = checkpoint_interval.snapshot_at(
            checkpoint_interval.snapshot_interval_s(self._cost_s, warm=self._copies > 1),
            step=step,
            step_s=self._step_s,
            since_s=now_s - self._kept_s,
            agree_at=plan.agree_at,
        )
        return checkpoint_interval.IntervalPlan(save_at=plan.save_at, keep_at=keep_at, agree_at=plan.agree_at)

    def _next_save(self, step: int, now_s: float, saving: bool) -> checkpoint_interval.IntervalPlan:
        ahead = max(1, round(checkpoint_interval.AGREE_EVERY_S / max(self._step_s, 1e-6)))
        agree_at = step + min(ahead, checkpoint_interval.FARTHEST_AGREEMENT_STEPS)
        if self._rule is None:
            return checkpoint_interval.IntervalPlan(agree_at=agree_at)
        self._asked = self._sink.wanted() or self._asked
        plan = checkpoint_interval.next_plan(
            self._rule,
            self._measured(now_s),
            step=step,
            step_s=self._step_s,
            since_save_s=now_s - self._saved_s,
            asked=self._asked and not saving,
        )
        return plan if plan.agree_at else checkpoint_interval.IntervalPlan(save_at=plan.save_at, agree_at=agree_at)

    def _exchange(
        self, plan: checkpoint_interval.IntervalPlan, busy: bool, stop: bool = False
    ) -> tuple[checkpoint_interval.IntervalPlan, bool, bool]:
        """Rank 0's plan, whether any rank is busy, whether rank 0 says to stop."""
        if self._place.world_size == 1:
            return plan, busy, stop
        mine = [plan.save_at, plan.keep_at, plan.agree_at, int(busy), int(stop)]
        numbers = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(numbers)
        save_at, keep_at, agree_at, busy_ranks, stopping = numbers.tolist()
        return (
            checkpoint_interval.IntervalPlan(save_at=save_at, keep_at=keep_at, agree_at=agree_at),
            busy_ranks > 0,
            stopping > 0,
        )

    def _part(self, state: State, *, save: bool) -> Part:
        place = self._place
        share, shares = (place.rank, place.world_size) if self._shared else (place.local_index, place.local_world_size)
        extra: dict[str, Any] = {}
        tensors = state.tensors(extra)
        table = tuple(info for info, _ in tensors)
        if (table, share, shares) != self._cut_for:
            self._cut_for = table, share, shares
            cuts = assign_shares(table, shares)
            # As the file will have them: what is kept beside a share says of each of its tensors where it belongs.
            self._cut = tuple(cuts[share][i] for i in file_order([table[i] for i in cuts[share]]))
            others: tuple[int, ...] = ()
            if self._snapshots and self._shared:
                held = beside_shares(share, shares, place.local_index, place.local_world_size)
                others = tuple(i for k in held for i in cuts[k])
            self._beside = Beside(tuple(table[i] for i in others), others)
            changing = state.volatile()
            self._chosen = (*self._cut, *others)
            self._volatile = frozenset(place for place, i in enumerate(self._chosen) if table[i].name in changing)
            self._own = tuple(table[i] for i in self._cut)
        mine, beside = self._cut, self._beside
        return Part(
            step=state.step,
            commit_generation=state.commit_generation,
            share=share,
            shares=shares,
            table=self._own,
            tensors=[tensors[i][1] for i in self._chosen],
            extra=extra_of(extra, mine),
            interval=self.describe(),
            beside=beside,
            part=place.local_index if self._snapshots else None,
            parts=place.local_world_size if self._snapshots else None,
            save=save,
            kept=checkpoint_interval.describe_snapshots(self._cost_s, warm=self._copies > 1) if self._snapshots else "",
            skipped=self.skipped,
            volatile=self._volatile,
        )
