"""Snapshots on the worker's side: when one is due, every rank copies its share into an arena of its agent's.

Ranks must agree on the step without a word per step. So about once a second, and at each checkpoint, they exchange
three numbers: rank 0's plan (the next step to save at, the next step to talk at), and whether anybody lacks a buffer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..checkpoint.arena import Arena
from ..checkpoint.errors import ArenaError
from ..checkpoint.layout import arena_nbytes
from ..core import cadence, messages
from ..core.beat import Doing
from ..core.shares import assign_shares
from ..core.tensors import Table
from .restore import extra_of
from .session import Session, ToldToLeave
from .state import State

ARENA_WAIT_S = 30.0
NO_MEMORY = -1
FINISH_S = 60.0
"""How long the last checkpoint of a job waits for the one before it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this worker stands in the present generation."""

    generation: int
    rank: int
    world: int
    local_index: int
    local_world: int


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's share of a snapshot."""

    step: int
    commit_generation: int
    share: int
    shares: int
    table: Table
    tensors: Sequence[torch.Tensor]
    extra: dict[str, Any]
    interval: str
    """How often snapshots are taken, in words."""


class Sink(Protocol):
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
        """Copy `part`; the step waits for it. False: skipped."""


class Keeper:
    """One per process; `enter` for each generation, `after` for each commit."""

    def __init__(self, sink: Sink, rule: cadence.Rule, *, shared: bool) -> None:
        self._sink = sink
        self._rule = rule
        self._shared = shared
        self._place = Place(0, 0, 1, 0, 1)
        self._plan = cadence.Plan()
        self._marked = (0, 0.0)
        self._step_s = 0.0
        self._began_s = self._saved_s = time.monotonic()
        self._cost_s: float | None = None
        self._generations = 0
        self._saved_step = -1
        self.skipped = 0

    def enter(self, place: Place, step: int) -> None:
        """A new generation, entered at `step`."""
        self._place = place
        self._generations += 1
        self._saved_step = -1  # alike on all ranks, newcomers among them
        self._marked = (step, time.monotonic())
        first = cadence.first_plan(self._rule, step)
        # Two steps in, the step time is known well enough to plan by it.
        self._plan = cadence.Plan(save_at=first.save_at, agree_at=step + 2)

    def after(self, state: State, *, keep: bool = True) -> None:
        """After each commit, on every rank at the same step. Without `keep` no rank saves: this one's state is bad."""
        step = state.step
        if step not in (self._plan.save_at, self._plan.agree_at):
            return
        save = step == self._plan.save_at
        now_s = time.monotonic()
        marked_step, marked_s = self._marked
        if step > marked_step:
            self._step_s = (now_s - marked_s) / (step - marked_step)
        self._marked = (step, now_s)
        if save:
            self._saved_s = now_s
        plan = self._next_plan(step, now_s, save) if self._place.rank == 0 else cadence.Plan()
        stop = self._place.rank == 0 and self._sink.stops()
        save_at, agree_at, busy, stop = self._exchange(plan, save and not (keep and self._sink.free()), stop)
        self._plan = cadence.Plan(save_at=save_at, agree_at=agree_at)
        if not save:
            return
        if busy:
            self.skipped += 1  # the one before is still being written
            return
        self._saved_step = step  # agreed by all, whether or not it works out on each
        began_s = time.monotonic()
        if not self._sink.put(self._part(state)):
            self.skipped += 1
        elif stop:
            raise ToldToLeave(f"stopped at step {step}, which is saved")
        stall_s = time.monotonic() - began_s
        self._cost_s = stall_s if self._cost_s is None else 0.7 * self._cost_s + 0.3 * stall_s

    def finish(self, state: State) -> None:
        """`train` has returned on this rank: save what it came to, unless that was just saved."""
        if state.step == self._saved_step:
            return
        self._sink.wait(FINISH_S)
        _, _, busy, _ = self._exchange(cadence.Plan(), not self._sink.free())
        if not busy:
            self._saved_step = state.step
        if busy or not self._sink.put(self._part(state)):
            self.skipped += 1

    def describe(self) -> str:
        """The interval in words, for status."""
        return cadence.describe(self._rule, self._measured(time.monotonic()))

    def _measured(self, now_s: float) -> cadence.Measured:
        return cadence.Measured(
            cost_s=self._cost_s,
            durable_s=self._sink.durable_s,
            failures=max(0, self._generations - 1),
            running_s=now_s - self._began_s,
        )

    def _next_plan(self, step: int, now_s: float, saving: bool) -> cadence.Plan:
        asked = self._sink.wanted()
        plan = cadence.next_plan(
            self._rule,
            self._measured(now_s),
            step=step,
            step_s=self._step_s,
            since_save_s=now_s - self._saved_s,
            asked=asked and not saving,
        )
        if plan.agree_at:
            return plan
        ahead = max(1, round(cadence.AGREE_EVERY_S / max(self._step_s, 1e-6)))
        return cadence.Plan(save_at=plan.save_at, agree_at=step + min(ahead, cadence.FARTHEST_AGREEMENT_STEPS))

    def _exchange(self, plan: cadence.Plan, busy: bool, stop: bool = False) -> tuple[int, int, bool, bool]:
        """(save_at, agree_at) of rank 0, whether anybody is busy, whether rank 0 says to stop."""
        if self._place.world == 1:
            return plan.save_at, plan.agree_at, busy, stop
        numbers = torch.tensor([plan.save_at, plan.agree_at, int(busy), int(stop)], dtype=torch.int64)
        dist.all_reduce(numbers)
        save_at, agree_at, busy_ranks, stopping = numbers.tolist()
        return save_at, agree_at, busy_ranks > 0, stopping > 0

    def _part(self, state: State) -> Part:
        place = self._place
        share, shares = (place.rank, place.world) if self._shared else (place.local_index, place.local_world)
        tensors = state.tensors()
        table = tuple(info for info, _ in tensors)
        mine = assign_shares(table, shares)[share]
        return Part(
            step=state.step,
            commit_generation=state.commit_generation,
            share=share,
            shares=shares,
            table=tuple(table[i] for i in mine),
            tensors=[tensors[i][1] for i in mine],
            extra=extra_of(state, mine),
            interval=self.describe(),
        )


class AgentSink:
    """Into the arenas that the agent owns: it writes them, also when this process is dead by then."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arenas: list[Arena] = []
        self._busy: set[int] = set()
        self._offers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[messages.Saved] = queue.SimpleQueue()
        self._durable_s = 0.0
        session.on(messages.Arena, self._on_arena)
        session.on(messages.Saved, self._on_saved)

    def _on_arena(self, _: messages.Message, descriptors: list[int]) -> None:
        for descriptor in descriptors or [NO_MEMORY]:
            self._offers.put(descriptor)

    def _on_saved(self, message: messages.Message, _: list[int]) -> None:
        assert isinstance(message, messages.Saved)
        self._results.put(message)

    @property
    def durable_s(self) -> float:
        return self._durable_s

    def wanted(self) -> bool:
        asked, self._session.save_wanted = self._session.save_wanted, False
        return asked

    def stops(self) -> bool:
        return self._session.stop_wanted

    def free(self) -> bool:
        self._take_results()
        return self._free_buffer() is not None

    def wait(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not self.free() and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                self._take(self._results.get(timeout=left_s))
            except queue.Empty:
                return

    def put(self, part: Part) -> bool:
        self._session.beat(Doing.SAVING)
        self._make_room(arena_nbytes(part.table))
        buffer = self._free_buffer()
        if buffer is None or not self._arenas:
            return False
        began_s = time.monotonic()
        arena = self._arenas[buffer]
        arena.layout(part.table, share=part.share, shares=part.shares)
        arena.fill(part.tensors).finish()
        arena.seal(part.step, part.commit_generation, extra=part.extra)
        self._busy.add(buffer)
        self._session.send(
            messages.Filled(
                generation=part.commit_generation,
                step=part.step,
                buffer=buffer,
                nbytes=arena.header().nbytes,
                share=part.share,
                shares=part.shares,
                stall_s=time.monotonic() - began_s,
                interval=part.interval,
            )
        )
        return True

    def _free_buffer(self) -> int | None:
        """The older of the buffers that nobody writes from; 0 while there are none yet."""
        if not self._arenas:
            return 0
        free = [i for i in range(len(self._arenas)) if i not in self._busy]
        return min(free, key=lambda i: _age(self._arenas[i]), default=None)

    def _make_room(self, nbytes: int) -> None:
        """Two buffers of at least `nbytes` from the agent; without them there is no snapshot."""
        if self._arenas and self._arenas[0].capacity >= nbytes:
            return
        for arena in self._arenas:
            arena.close()
        self._arenas, self._busy = [], set()
        self._session.send(messages.NeedArena(nbytes=nbytes))
        deadline_s = time.monotonic() + ARENA_WAIT_S
        while len(self._arenas) < 2:
            try:
                descriptor = self._offers.get(timeout=max(0.0, deadline_s - time.monotonic()))
                if descriptor == NO_MEMORY:
                    return
                self._arenas.append(Arena.from_fd(descriptor))
            except (queue.Empty, ArenaError):
                self._arenas = []
                return

    def _take_results(self) -> None:
        while True:
            try:
                message = self._results.get_nowait()
            except queue.Empty:
                return
            self._take(message)

    def _take(self, message: messages.Saved) -> None:
        self._busy.discard(message.buffer)
        self._durable_s = message.seconds or self._durable_s


def _age(arena: Arena) -> tuple[int, int]:
    header = arena.header()
    return (header.generation, header.step) if header.whole else (-1, -1)
