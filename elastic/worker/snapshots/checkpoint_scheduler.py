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
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from elastic.checkpoint import interval
from elastic.checkpoint.format.layout import file_order
from elastic.checkpoint.format.plain import tensors_named
from elastic.checkpoint.format.shard_plan import beside_shards, split
from elastic.checkpoint.interval import IntervalPlan, IntervalRule
from elastic.contract.worker.messages import Copies, CopyState
from elastic.contract.worker.tensor_table import ReplicaTensors, Table
from elastic.worker.comm.in_flight import complete
from elastic.worker.link.session import GenerationEnded
from elastic.worker.state.handover.restore import extra_of
from elastic.worker.state.state import State
from elastic.worker.torch_internals import gc_pause

from .agent_snapshots import AgentSnapshots, SnapshotPart
from .snapshot_policy import SnapshotPolicy

_STATES = tuple(CopyState)
MAX_NODES, MAX_STEP = 1 << 32, 1 << 62

FINISH_S = 60.0
"""As `finish_s` below, under an agent, which has a second buffer."""


class RankPosition(msgspec.Struct, frozen=True):
    """This worker's position in the current generation."""

    rank: int
    world_size: int
    local_index: int
    local_world_size: int
    key: int = 0
    """Equal on ranks that hold the same part of the state; 0: all of it."""
    leads: bool = True
    """The lowest rank of that key: it saves what all of them have."""
    staged: bool = False
    """See `SyncResult.staged`: each key then saves all that it has, and loads no other's."""
    planner: int = 0
    """The rank whose plan counts: one that has been there for long, so that it knows when the last checkpoint was and
    how often ranks fail. Rank 0 may have been replaced a moment ago."""
    node: int = 0
    """Position of this node among the nodes."""


Numbers = tuple[Sequence[int], Sequence[int]]
"""Indices in the complete table: of the tensors that a rank saves, and of those that it keeps in memory beside them."""


class PartLayout(msgspec.Struct, frozen=True):
    """Which of the state's tensors a rank's part has. Numbers are indices in the complete table."""

    whole: Table
    """The complete table."""
    own: Table
    positions: Sequence[int]
    """Of `own`, with those of values and objects behind all others."""
    chosen: Sequence[int]
    """The numbers of `own`, then those of `beside`."""
    beside: ReplicaTensors
    volatile: frozenset[int]
    """Indices in `chosen`."""


class Agreed(NamedTuple):
    """The outcome of an exchange, the same on all ranks."""

    plan: IntervalPlan
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
    copies: Copies | None
    """See `Filled`."""


class CheckpointScheduler:
    """One per process. Call `enter` for each generation and `after` for each commit."""

    def __init__(
        self,
        backend: AgentSnapshots,
        rule: IntervalRule | None,
        *,
        shared: bool,
        snapshots: bool = False,
        finish_s: float = FINISH_S,
    ) -> None:
        """`rule`: when checkpoints are due; None: none are taken. `snapshots`: keep the newest state in memory as
        well. `finish_s`: how long the last checkpoint waits for the previous one to be written."""
        self._backend = backend
        self.policy = SnapshotPolicy(rule, snapshots=snapshots, now_s=time.monotonic())
        self._shared = shared
        self._snapshots = snapshots
        self._finish_s = finish_s
        self._place = RankPosition(0, 1, 0, 1)
        self._stall_s: float | None = None
        """What it took to begin the copy that is to be settled; None: there is none."""
        self._prepared = False
        self._layout: PartLayout | None = None
        self._saved_step = self._lost_step = -1
        self._copies: Copies | None = None

    def enter(self, place: RankPosition, step: int) -> None:
        """Begin a generation at `step`."""
        self._layout = None  # a standby's state may have moved to a GPU since
        self._place = place
        self._saved_step = self._lost_step = -1  # the same on all ranks, new workers among them
        self.policy.enter(step, time.monotonic())

    def exchanges_at(self, step: int) -> bool:
        """Whether `after` does more at `step` than to settle; the same on all ranks."""
        plan = self.policy.plan
        return step == plan.agree_at or step == plan.keep_at or step == plan.save_at

    def after(self, state: State, *, keep: bool = True, digest: tuple[int, int] = (0, 0)) -> bool:
        """Called after each commit, on every rank at the same step. Returns whether one of the ranks' `digest` (two,
        of 63 bits) differs, on all of them alike.

        With `keep` False on any rank, because its state is bad, or where the first digest differs, no rank takes a
        snapshot at this step. Raises GenerationEnded after a checkpoint at which training is to stop.
        """
        self.settle()  # no optimizer step has run since
        step, policy = state.step, self.policy
        if not self.exchanges_at(step):
            return False
        save, take = policy.due(step)
        now_s = time.monotonic()
        policy.asked = policy.rule is not None and (self._backend.wanted() or policy.asked)
        plan = policy.next_plan(step, now_s, self._backend.durable_s)
        lacks = take and not (keep and self._backend.free())
        agreed = self._exchange(plan if self._place.rank == self._place.planner else IntervalPlan(), lacks, digest)
        differ, drift = agreed.differ
        policy.plan, policy.asked = agreed.plan, agreed.asked
        policy.cost.exchanged(agreed.cost_us)
        self._copies = agreed.copies
        if not take:
            if not self._prepared:  # once per process, after two steps: by then an optimizer has all its state
                self._prepared = True
                self._backend.prepare(self._part(state, save=True))
            return differ or drift
        if agreed.busy or differ:
            policy.passed(save=save)
            return differ or drift
        policy.took(now_s, save=save)
        if save:
            self._saved_step = step  # agreed by all ranks, whether or not the copy succeeds on each
        kept = self._put(state, save=save)
        if save and not kept:
            self._lost_step = step
        if kept and save and agreed.stop:
            self.settle()
            raise GenerationEnded(f"stopped at step {step}, which is saved", between=True)
        return drift

    def finish(self, state: State) -> None:
        """`train` has returned on this rank: save the final state, unless that step was just saved; once more if that
        is known to have failed on any rank."""
        self.settle()
        if self.policy.rule is None:
            return
        if state.step == self._saved_step:
            lost = state.step == self._lost_step or self._backend.failed(state.step)
            if not self._exchange(IntervalPlan(), lost).busy:
                return
        if self._place.rank == 0 and not state.clean():
            said = (
                f"the checkpoint of step {state.step} has this change, too, and a job that resumes from it repeats it"
            )
            text = f"elastic: `train` has returned after an optimizer's step without job.commit: {said}"
            print(text, file=sys.stderr, flush=True)
        self._save_now(state, "final state, of")

    def moves(self, state: State) -> None:
        """The world is about to change, by plan, and with it which part of the state a rank has: save, so that each can
        load its new one. All ranks call it at the same step."""
        self.settle()
        if self._place.key and self.policy.rule is not None and state.step != self._saved_step:
            self._save_now(state, "state before the world changes, of")

    def _save_now(self, state: State, what: str) -> None:
        self._backend.wait(self._finish_s)
        if self._exchange(IntervalPlan(), not self._backend.free()).busy:
            self.policy.skipped += 1
            if self._place.rank == 0:
                said = f"the {what} step {state.step}, is not saved: an earlier checkpoint was still being"
                print(f"elastic: {said} written after {self._finish_s:g} s", file=sys.stderr, flush=True)
            return
        self._saved_step = state.step
        self._put(state, save=True)
        self.settle()

    def settle(self) -> None:
        """The state is about to change: complete the copy under way first.

        Raises RuntimeError if the device failed meanwhile; the previous snapshot then remains the newest.
        """
        if self._stall_s is None:
            return
        stall_s, self._stall_s = self._stall_s, None
        began_s = time.monotonic()
        self._backend.settle()
        # Overlapped steps are slower by at most `beside_s`: not visible as a stall, but part of the cost of a snapshot.
        self.policy.cost.add(stall_s + time.monotonic() - began_s + self._backend.beside_s)

    def leave(self) -> None:
        """The generation is over, and the next one may bring another state. Called after the process group was aborted.

        A copy under way no longer depends on other ranks. It is of a committed step. A copy by the GPU is completed
        like any other; one by the CPU is dropped unless it is complete, as the other ranks wait for this one. If the
        device has failed the copy is dropped, and the next operation on the device raises.
        """
        self._stall_s = None
        with contextlib.suppress(RuntimeError):
            self._backend.leave()

    def _put(self, state: State, *, save: bool) -> bool:
        self._prepared = True
        began_s = time.monotonic()
        with gc_pause.paused():
            kept = self._backend.put(self._part(state, save=save))
        self.policy.skipped += save and not kept
        stall_s = time.monotonic() - began_s
        if kept and self._backend.copying:
            self._stall_s = stall_s
        elif kept:
            self.policy.cost.add(stall_s)
        return kept

    def _exchange(self, plan: IntervalPlan, busy: bool, digest: tuple[int, int] = (0, 0)) -> Agreed:
        asked, stop = self.policy.asked, self._backend.stops()
        if self._place.world_size == 1:
            return Agreed(plan, busy, asked, stop, (False, False), 0, None)
        mine = [plan.save_at, plan.keep_at, plan.agree_at, int(busy), int(asked), int(stop), self.policy.cost.own_us]
        state, copied = self._backend.copied()
        # The worst state, with its node; the oldest copy, negated.
        mine += [_STATES.index(state) * MAX_NODES + self._place.node]
        mine += [-copied if state is not CopyState.REPLICAS else -MAX_STEP]
        # Of each digest the largest and, negated, the smallest.
        numbers = torch.tensor([*mine, *digest, *(-each for each in digest)], dtype=torch.int64)
        complete(dist.all_reduce(numbers, dist.ReduceOp.MAX, async_op=True), numbers.device)
        save_at, keep_at, agree_at, any_busy, any_asked, any_stop, cost_us, worst, oldest, *digests = numbers.tolist()
        most, most_drift, least, least_drift = digests
        return Agreed(
            IntervalPlan(save_at=save_at, keep_at=keep_at, agree_at=agree_at),
            any_busy > 0,
            any_asked > 0,
            any_stop > 0,
            (most != -least, most_drift != -least_drift),
            cost_us,
            Copies(_STATES[worst // MAX_NODES], worst % MAX_NODES, -oldest) if self._place.key else None,
        )

    def _part(self, state: State, *, save: bool) -> SnapshotPart:
        place, policy = self._place, self.policy
        shard, shards = (place.rank, place.world_size) if self._shared else (place.local_index, place.local_world_size)
        extra: dict[str, Any] = {}
        tensors = state.tensors(extra)
        table = tuple(info for info, _ in tensors)
        layout = self._layout
        if layout is None or layout.whole != table:
            state.refuse_growth(table, extra)
            layout = self._layout = self._laid_out(state, table, tensors_named(extra), shard, shards)
        measured = policy.measured(time.monotonic(), self._backend.durable_s)
        return SnapshotPart(
            step=state.step,
            commit_generation=state.version[0],
            shard=shard,
            shards=shards,
            table=layout.own,
            tensors=[tensors[i][1] for i in layout.chosen],
            extra=extra_of(extra, layout.positions, place.key, staged=place.staged),
            interval=interval.describe(policy.rule, measured) if policy.rule is not None else "",
            beside=layout.beside,
            part=(0 if place.key else place.local_index) if self._snapshots else None,
            parts=(1 if place.key else place.local_world_size) if self._snapshots else None,
            save=save,
            kept=interval.describe_snapshots(policy.cost.seconds, warm=policy.cost.warm) if self._snapshots else "",
            skipped=policy.skipped,
            copies=self._copies,
            volatile=layout.volatile,
        )

    def _laid_out(self, state: State, table: Table, named: Collection[str], shard: int, shards: int) -> PartLayout:
        """`named`: the tensors of values and objects."""
        cuts, apart = split(table, named, shards)
        if self._place.key:
            mine, others = self._own_boxes(table, cuts, apart, shard, state.buffers())
        else:
            mine, others = self._cut(cuts, apart, shard)
        changing = state.volatile()
        # In the order of the file: the description of tensors kept beside a shard gives the position of each.
        own = tuple(mine[i] for i in file_order([table[i] for i in mine]))
        positions = {i: n for n, i in enumerate((*sorted(i for cut in cuts for i in cut), *apart))}
        chosen = (*own, *others)
        volatile = frozenset(at for at, i in enumerate(chosen) if table[i].name in changing)
        beside = ReplicaTensors(tuple(table[i] for i in others), tuple(positions[i] for i in others))
        return PartLayout(table, tuple(table[i] for i in own), [positions[i] for i in own], chosen, beside, volatile)

    def _cut(self, cuts: Sequence[Sequence[int]], apart: Sequence[int], shard: int) -> Numbers:
        """Replicated state: each rank saves its shard, and the ranks of a node together keep all."""
        mine = cuts[shard] if shard else (*cuts[0], *apart)
        if not (self._snapshots and self._shared):
            return mine, ()
        held = beside_shards(shard, len(cuts), self._place.local_index, self._place.local_world_size)
        others = tuple(i for k in held for i in cuts[k])
        # The JSON of a node's first rank is read with the node's snapshot.
        return mine, (*others, *apart) if shard and not self._place.local_index else others

    def _own_boxes(
        self, table: Table, cuts: Sequence[Sequence[int]], apart: Sequence[int], shard: int, buffers: Collection[str]
    ) -> Numbers:
        """Each rank keeps all that it has. The lowest of each key saves its boxes and what it may have other values of
        than the ranks of other keys: buffers, values and objects. All else is alike, and rank 0 saves it."""
        numbers = (*sorted(i for cut in cuts for i in cut), *apart)
        own, place = set(apart), self._place
        by_key = {i for i in numbers if place.staged or table[i].of or i in own or table[i].name in buffers}
        saves = [i for i in numbers if (place.leads if i in by_key else shard == 0)]
        others = [i for i in numbers if i not in set(saves)]
        return saves, others if self._snapshots else ()
