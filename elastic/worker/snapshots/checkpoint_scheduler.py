"""Snapshots on the worker's side: when one is due, each rank copies its part into an arena owned by its agent.

Some snapshots are written to disk, as checkpoints; the others, which are more frequent, stay in the agents' memory. The
ranks of a node together keep the complete state there, so any surviving node has it.

Ranks must take a snapshot at the same step without communicating at every step. About once a second, and at each
snapshot, they exchange a few numbers: one rank's plan (the next steps at which to save, to keep in memory and to
exchange), whether any rank is asked for a checkpoint or lacks a free buffer, and what a snapshot costs the rank whose
copy takes longest: all ranks wait for that one.

A large copy overlaps the next forward and backward. The optimizer's guard calls `settle` before each step, which
completes the copy before the copied tensors change; only then does it count as a snapshot.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist

from elastic.checkpoint import interval as checkpoint_interval
from elastic.checkpoint.format.layout import file_order
from elastic.checkpoint.format.plain import tensors_named
from elastic.checkpoint.format.shard_plan import beside_shards, split
from elastic.contract.worker.tensor_table import NO_REPLICAS, ReplicaTensors, Table
from elastic.worker.link.session import GenerationEnded
from elastic.worker.state.handover.restore import extra_of
from elastic.worker.state.state import State
from elastic.worker.torch_internals import gc_pause

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
        known_s = self._own_s
        if self._cold:
            self._cold -= 1
            if not self._warm:
                self._own_s = seconds if known_s is None else min(known_s, seconds)
        elif known_s is not None and self._warm:
            self._own_s = 0.7 * known_s + 0.3 * min(seconds, OUTLIER * known_s + LEAST_OUTLIER_S)
        else:
            self._own_s = seconds if known_s is None else min(known_s, seconds)
            self._warm = True

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


FINISH_S = 60.0
"""As `finish_s` below, under an agent, which has a second buffer."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """This worker's position in the current generation."""

    generation: int
    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    planner: int = 0
    """The rank whose plan counts: one that has been there for long, so that it knows when the last checkpoint was and
    how often ranks fail. Rank 0 may have been replaced a moment ago."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """This rank's part of a snapshot."""

    step: int
    commit_generation: int
    shard: int
    shards: int
    table: Table
    tensors: Sequence[torch.Tensor]
    """The tensors of `table`, then those of `beside`."""
    extra: dict[str, Any]
    interval: str
    """The checkpoint interval, as text."""
    beside: ReplicaTensors = NO_REPLICAS
    """Shards of other nodes, which this rank keeps in memory in addition to its own."""
    part: int | None = None
    parts: int | None = None
    """Which piece of the node's complete snapshot this rank's tensors are (own shard and those beside it): `part` of
    `parts`. None: as `shard` of `shards`."""
    save: bool = True
    """Write the shard to disk; False: keep it in memory only."""
    kept: str = ""
    """The interval of in-memory snapshots, as text."""
    skipped: int = 0
    """Number of checkpoints so far that were due and not taken."""
    volatile: Collection[int] = ()
    """Indices of tensors that may change before the next optimizer step: copied before any work that is queued
    later."""

    def own(self) -> SnapshotPart:
        """The same part without the other nodes' shards."""
        count = len(self.table)
        volatile = frozenset(place for place in self.volatile if place < count)
        return replace(self, tensors=self.tensors[:count], beside=NO_REPLICAS, part=None, parts=None, volatile=volatile)


class SnapshotBackend(Protocol):
    """Destination of snapshots."""

    @property
    def durable_s(self) -> float:
        """Seconds until the last snapshot was on disk; 0: not known."""

    def wanted(self) -> bool:
        """Whether a checkpoint was requested since the last call."""

    def stops(self) -> bool:
        """Whether training is to stop at the requested checkpoint."""

    def free(self) -> bool:
        """Whether a buffer is free."""

    def wait(self, limit_s: float) -> None:
        """Return when a buffer is free, or after `limit_s` seconds."""

    def failed(self, step: int) -> bool:
        """Whether this rank's part of the save of `step` is known to have failed."""

    def put(self, part: SnapshotPart) -> bool:
        """Copy `part`, or begin to. Returns False if the snapshot was skipped."""

    @property
    def copying(self) -> bool:
        """Whether a copy is under way that is still to be settled."""

    def settle(self) -> None:
        """Wait for the copy under way; from then on it is a snapshot. Raises RuntimeError if it failed; it is then
        dropped."""

    @property
    def beside_s(self) -> float:
        """Core seconds that the last settled copy took from the steps it overlapped."""

    def leave(self) -> None:
        """As `settle`, but a copy that other ranks would have to wait for is dropped."""

    def prepare(self, part: SnapshotPart) -> None:
        """Announce that a part like `part` will be put, so that work independent of its content overlaps the steps
        until then."""


class Agreed(NamedTuple):
    """The outcome of an exchange, the same on all ranks."""

    plan: checkpoint_interval.IntervalPlan
    """The planner's."""
    busy: bool
    """Any rank lacks a free buffer."""
    asked: bool
    """Any rank is asked for a checkpoint."""
    stop: bool
    """Any rank is told to stop at it."""
    differ: tuple[bool, bool]
    """Whether the ranks' digests, of two kinds, are not all the same."""
    cost_us: int
    """Largest cost of a snapshot of all ranks; 0: measured on none."""


class CheckpointScheduler:
    """One per process. Call `enter` for each generation and `after` for each commit."""

    def __init__(
        self,
        backend: SnapshotBackend,
        rule: checkpoint_interval.IntervalRule | None,
        *,
        shared: bool,
        snapshots: bool = False,
        finish_s: float = FINISH_S,
    ) -> None:
        """`rule`: when checkpoints are due; None: none are taken. `snapshots`: keep the newest state in memory as
        well. `finish_s`: how long the last checkpoint waits for the previous one to be written."""
        self._backend = backend
        self._rule = rule
        self._shared = shared
        self._snapshots = snapshots
        self._finish_s = finish_s
        self._place = RankPosition(0, 0, 1, 0, 1)
        self._plan = checkpoint_interval.IntervalPlan()
        self._entered = 0
        """The step at which the generation began."""
        self._marked = (0, 0.0)
        self._step_s = 0.0
        self._began_s = self._saved_s = self._kept_s = time.monotonic()
        self._cost = SnapshotCost()
        self._stall_s = 0.0
        self._unsettled = False
        self._prepared = False
        self._cut_for: tuple[Table, int, int] = ((), 0, 0)
        self._cut: tuple[int, ...] = ()
        self._positions: dict[int, int] = {}
        """Index of a tensor here -> its position in the complete table; of values' and objects' tensors at the end."""
        self._beside = NO_REPLICAS
        self._chosen: tuple[int, ...] = ()
        self._own: Table = ()
        self._volatile: frozenset[int] = frozenset()
        self._generations = 0
        self._saved_step = self._lost_step = -1
        self._asked = False
        """A checkpoint was requested, and none was begun since."""
        self._late = False
        """A checkpoint was due and was not taken, and none was begun since."""
        self.skipped = 0

    def enter(self, place: RankPosition, step: int) -> None:
        """Begin a generation at `step`."""
        self._cut_for = ((), 0, 0)  # a standby's state may have moved to a GPU since
        self._place = place
        self._cost.enter()
        self._generations += 1
        self._saved_step = self._lost_step = -1  # the same on all ranks, new workers among them
        self._late = False
        self._marked = (step, time.monotonic())
        first = checkpoint_interval.first_plan(self._rule, step, snapshots=self._snapshots)
        # After two steps the step time is known well enough to plan with it; after one, what the turn does once it has
        # committed, such as an evaluation, is not in it.
        self._entered = step
        self._plan = checkpoint_interval.IntervalPlan(save_at=first.save_at, keep_at=first.keep_at, agree_at=step + 2)

    def exchanges_at(self, step: int) -> bool:
        """Whether `after` does more at `step` than to settle; the same on all ranks."""
        plan = self._plan
        return step == plan.agree_at or step == plan.keep_at or step == plan.save_at

    def after(self, state: State, *, keep: bool = True, digest: tuple[int, int] = (0, 0)) -> bool:
        """Called after each commit, on every rank at the same step. Returns whether one of the ranks' `digest` (two,
        of 63 bits) differs, on all of them alike.

        With `keep` False on any rank, because its state is bad, or where the first digest differs, no rank takes a
        snapshot at this step. Raises GenerationEnded after a checkpoint at which training is to stop.
        """
        self.settle()  # no optimizer step has run since
        step = state.step
        if not self.exchanges_at(step):
            return False
        save = step == self._plan.save_at
        take = save or step == self._plan.keep_at
        now_s = time.monotonic()
        marked_step, marked_s = self._marked
        if step > marked_step:
            self._step_s = (now_s - marked_s) / (step - marked_step)
        self._marked = (step, now_s)
        saved_s, kept_s = self._saved_s, self._kept_s
        if save:
            self._saved_s = now_s
        if take:
            self._kept_s = now_s
        self._asked = self._rule is not None and (self._backend.wanted() or self._asked)
        plans = self._place.rank == self._place.planner
        plan = self._next_plan(step, now_s, save) if plans else checkpoint_interval.IntervalPlan()
        lacks = take and not (keep and self._backend.free())
        self._plan, busy, self._asked, stop, (differ, drift), cost_us = self._exchange(plan, lacks, digest)
        self._cost.exchanged(cost_us)
        if not take:
            self._prepare(state)
            return differ or drift
        if busy or differ:
            fixed = self._rule is not None and self._rule.every_steps > 0
            self.skipped += save and (fixed or not self._late)  # the previous one is still being written
            self._late = self._late or save
            self._saved_s, self._kept_s = saved_s, kept_s  # both stay due: checked again at the next exchange
            return differ or drift
        if save:
            self._asked = self._late = False
            self._saved_step = step  # agreed by all ranks, whether or not the copy succeeds on each
        kept = self._put(state, save=save)
        if save and not kept:
            self._lost_step = step
        if kept and save and stop:
            self.settle()
            raise GenerationEnded(f"stopped at step {step}, which is saved", between=True)
        return drift

    def finish(self, state: State) -> None:
        """`train` has returned on this rank: save the final state, unless that step was just saved; once more if that
        is known to have failed on any rank."""
        self.settle()
        if self._rule is None:
            return
        if state.step == self._saved_step:
            lost = state.step == self._lost_step or self._backend.failed(state.step)
            if not self._exchange(checkpoint_interval.IntervalPlan(), lost).busy:
                return
        if self._place.rank == 0 and not state.clean():
            said = (
                f"the checkpoint of step {state.step} has this change, too, and a job that resumes from it repeats it"
            )
            text = f"elastic: `train` has returned after an optimizer's step without job.commit: {said}"
            print(text, file=sys.stderr, flush=True)
        self._backend.wait(self._finish_s)
        if self._exchange(checkpoint_interval.IntervalPlan(), not self._backend.free()).busy:
            self.skipped += 1
            if self._place.rank == 0:
                said = f"the final state, of step {state.step}, is not saved: an earlier checkpoint was still being"
                print(f"elastic: {said} written after {self._finish_s:g} s", file=sys.stderr, flush=True)
            return
        self._saved_step = state.step
        self._put(state, save=True)
        self.settle()

    def settle(self) -> None:
        """The state is about to change: complete the copy under way first.

        Raises RuntimeError if the device failed meanwhile; the previous snapshot then remains the newest.
        """
        if not self._unsettled:
            return
        self._unsettled = False
        began_s = time.monotonic()
        self._backend.settle()
        # Overlapped steps are slower by at most `beside_s`: not visible as a stall, but part of the cost of a snapshot.
        self._cost.add(self._stall_s + time.monotonic() - began_s + self._backend.beside_s)

    def leave(self) -> None:
        """The generation is over, and the next one may bring another state. Called after the process group was aborted.

        A copy under way no longer depends on other ranks. It is of a committed step. A copy by the GPU is completed
        like any other; one by the CPU is dropped unless it is complete, as the other ranks wait for this one. If the
        device has failed the copy is dropped, and the next operation on the device raises.
        """
        self._unsettled = False
        with contextlib.suppress(RuntimeError):
            self._backend.leave()

    def describe(self) -> str:
        """The checkpoint interval as text, for status."""
        return (
            checkpoint_interval.describe(self._rule, self._measured(time.monotonic())) if self._rule is not None else ""
        )

    def _describe_snapshots(self) -> str:
        return checkpoint_interval.describe_snapshots(self._cost.seconds, warm=self._cost.warm)

    def _prepare(self, state: State) -> None:
        """Once per process, after two steps: by then an optimizer has all its state."""
        if not self._prepared:
            self._prepared = True
            self._backend.prepare(self._part(state, save=True))

    def _put(self, state: State, *, save: bool) -> bool:
        self._prepared = True
        began_s = time.monotonic()
        with gc_pause.paused():
            kept = self._backend.put(self._part(state, save=save))
        self.skipped += save and not kept
        if not kept:
            return False
        self._stall_s = time.monotonic() - began_s
        if self._backend.copying:
            self._unsettled = True
        else:
            self._cost.add(self._stall_s)
        return True

    def _measured(self, now_s: float) -> checkpoint_interval.Measured:
        return checkpoint_interval.Measured(
            cost_s=self._cost.seconds,
            durable_s=self._backend.durable_s,
            failures=max(0, self._generations - 1),
            running_s=now_s - self._began_s,
        )

    def _next_plan(self, step: int, now_s: float, saving: bool) -> checkpoint_interval.IntervalPlan:
        plan = self._next_save(step, now_s, saving)
        if step == self._entered + 1:
            plan = msgspec.structs.replace(plan, agree_at=step + 1)
        if not self._snapshots:
            return plan
        return checkpoint_interval.with_snapshot(
            plan,
            checkpoint_interval.snapshot_interval_s(self._cost.seconds, warm=self._cost.warm),
            step=step,
            step_s=self._step_s,
            since_s=now_s - self._kept_s,
        )

    def _next_save(self, step: int, now_s: float, saving: bool) -> checkpoint_interval.IntervalPlan:
        ahead = max(1, round(checkpoint_interval.AGREE_EVERY_S / max(self._step_s, 1e-6)))
        agree_at = step + min(ahead, checkpoint_interval.FARTHEST_AGREEMENT_STEPS)
        if self._rule is None:
            return checkpoint_interval.IntervalPlan(agree_at=agree_at)
        plan = checkpoint_interval.next_plan(
            self._rule,
            self._measured(now_s),
            step=step,
            step_s=self._step_s,
            since_save_s=now_s - self._saved_s,
            asked=self._asked and not saving,
        )
        return plan if plan.agree_at else checkpoint_interval.IntervalPlan(save_at=plan.save_at, agree_at=agree_at)

    def _exchange(self, plan: checkpoint_interval.IntervalPlan, busy: bool, digest: tuple[int, int] = (0, 0)) -> Agreed:
        asked, stop = self._asked, self._backend.stops()
        if self._place.world_size == 1:
            return Agreed(plan, busy, asked, stop, (False, False), 0)
        mine = [plan.save_at, plan.keep_at, plan.agree_at, int(busy), int(asked), int(stop), self._cost.own_us]
        # Of each digest the largest and, negated, the smallest.
        numbers = torch.tensor([*mine, *digest, *(-each for each in digest)], dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        save_at, keep_at, agree_at, any_busy, any_asked, any_stop, cost_us, *digests = numbers.tolist()
        most, most_drift, least, least_drift = digests
        return Agreed(
            checkpoint_interval.IntervalPlan(save_at=save_at, keep_at=keep_at, agree_at=agree_at),
            any_busy > 0,
            any_asked > 0,
            any_stop > 0,
            (most != -least, most_drift != -least_drift),
            cost_us,
        )

    def _part(self, state: State, *, save: bool) -> SnapshotPart:
        place = self._place
        shard, shards = (place.rank, place.world_size) if self._shared else (place.local_index, place.local_world_size)
        extra: dict[str, Any] = {}
        tensors = state.tensors(extra)
        table = tuple(info for info, _ in tensors)
        if (table, shard, shards) != self._cut_for:
            state.refuse_growth(table, extra)
            self._cut_for = table, shard, shards
            cuts, apart = split(table, tensors_named(extra), shards)
            own = cuts[shard] if shard else (*cuts[0], *apart)
            # In the order of the file: the description of tensors kept beside a shard gives the position of each.
            self._cut = tuple(own[i] for i in file_order([table[i] for i in own]))
            self._positions = {i: n for n, i in enumerate((*sorted(i for cut in cuts for i in cut), *apart))}
            others: tuple[int, ...] = ()
            if self._snapshots and self._shared:
                held = beside_shards(shard, shards, place.local_index, place.local_world_size)
                others = tuple(i for k in held for i in cuts[k])
                if shard and not place.local_index:  # this rank's JSON is read with the node's snapshot
                    others += apart
            self._beside = ReplicaTensors(tuple(table[i] for i in others), tuple(self._positions[i] for i in others))
            changing = state.volatile()
            self._chosen = (*self._cut, *others)
            self._volatile = frozenset(place for place, i in enumerate(self._chosen) if table[i].name in changing)
            self._own = tuple(table[i] for i in self._cut)
        mine, beside = self._cut, self._beside
        return SnapshotPart(
            step=state.step,
            commit_generation=state.commit_generation,
            shard=shard,
            shards=shards,
            table=self._own,
            tensors=[tensors[i][1] for i in self._chosen],
            extra=extra_of(extra, [self._positions[i] for i in mine]),
            interval=self.describe(),
            beside=beside,
            part=place.local_index if self._snapshots else None,
            parts=place.local_world_size if self._snapshots else None,
            save=save,
            kept=self._describe_snapshots() if self._snapshots else "",
            skipped=self.skipped,
            volatile=self._volatile,
        )
