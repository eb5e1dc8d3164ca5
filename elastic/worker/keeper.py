"""Snapshots on the worker's side: when one is due, every rank copies its share into an arena of its agent's.

Ranks must agree on the step without a word per step. So about once a second, and at each checkpoint, they exchange
three numbers: rank 0's plan (the next step to save at, the next step to talk at), and whether anybody lacks a buffer.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..checkpoint.arena import Arena
from ..checkpoint.errors import ArenaError
from ..checkpoint.layout import arena_nbytes
from ..core import cadence, messages
from ..core.beat import Doing
from ..core.shares import assign_shares
from .restore import extra_of
from .session import Session
from .state import State

ARENA_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where this worker stands in the present generation."""

    generation: int
    rank: int
    world: int
    local_index: int
    local_world: int


class Keeper:
    """One per process; `enter` for each generation, `after` for each commit."""

    def __init__(self, session: Session, rule: cadence.Rule, *, shared: bool) -> None:
        self._session = session
        self._rule = rule
        self._shared = shared
        self._place = Place(0, 0, 1, 0, 1)
        self._plan = cadence.Plan()
        self._arenas: list[Arena] = []
        self._busy: set[int] = set()
        self._offers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[messages.Saved] = queue.SimpleQueue()
        self._marked = (0, 0.0)
        self._step_s = 0.0
        self._began_s = self._saved_s = time.monotonic()
        self._cost_s: float | None = None
        self._durable_s = 0.0
        self._generations = 0
        self.skipped = 0
        session.on(messages.Arena, self._on_arena)
        session.on(messages.Saved, self._on_saved)

    def _on_arena(self, _: messages.Message, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            self._offers.put(descriptor)

    def _on_saved(self, message: messages.Message, _: list[int]) -> None:
        assert isinstance(message, messages.Saved)
        self._results.put(message)

    def enter(self, place: Place, step: int) -> None:
        """A new generation, entered at `step`."""
        self._place = place
        self._generations += 1
        self._marked = (step, time.monotonic())
        first = cadence.first_plan(self._rule, step)
        # Two steps in, the step time is known well enough to plan by it.
        self._plan = cadence.Plan(save_at=first.save_at, agree_at=step + 2)

    def after(self, state: State) -> None:
        """After each commit, on every rank at the same step."""
        step = state.step
        if step not in (self._plan.save_at, self._plan.agree_at):
            return
        save = step == self._plan.save_at
        self._take_results()
        now_s = time.monotonic()
        marked_step, marked_s = self._marked
        if step > marked_step:
            self._step_s = (now_s - marked_s) / (step - marked_step)
        self._marked = (step, now_s)
        if save:
            self._saved_s = now_s
        plan = self._next_plan(step, now_s, save) if self._place.rank == 0 else cadence.Plan()
        save_at, agree_at, busy = self._exchange(plan, save and self._free_buffer() is None)
        self._plan = cadence.Plan(save_at=save_at, agree_at=agree_at)
        if save and busy:
            self.skipped += 1  # the one before is still being written
        elif save:
            self._snapshot(state)

    def _next_plan(self, step: int, now_s: float, saving: bool) -> cadence.Plan:
        asked, self._session.save_wanted = self._session.save_wanted, False
        measured = cadence.Measured(
            cost_s=self._cost_s,
            durable_s=self._durable_s,
            failures=max(0, self._generations - 1),
            running_s=now_s - self._began_s,
        )
        plan = cadence.next_plan(
            self._rule,
            measured,
            step=step,
            step_s=self._step_s,
            since_save_s=now_s - self._saved_s,
            asked=asked and not saving,
        )
        if plan.agree_at:
            return plan
        ahead = max(1, round(cadence.AGREE_EVERY_S / max(self._step_s, 1e-6)))
        return cadence.Plan(save_at=plan.save_at, agree_at=step + min(ahead, cadence.FARTHEST_AGREEMENT_STEPS))

    def _exchange(self, plan: cadence.Plan, busy: bool) -> tuple[int, int, bool]:
        """(save_at, agree_at) of rank 0, and whether anybody is busy."""
        if self._place.world == 1:
            return plan.save_at, plan.agree_at, busy
        numbers = torch.tensor([plan.save_at, plan.agree_at, int(busy)], dtype=torch.int64)
        dist.all_reduce(numbers)
        save_at, agree_at, busy_ranks = numbers.tolist()
        return save_at, agree_at, busy_ranks > 0

    def _free_buffer(self) -> int | None:
        """The older of the buffers that nobody writes from; 0 while there are none yet."""
        if not self._arenas:
            return 0
        free = [i for i in range(len(self._arenas)) if i not in self._busy]
        return min(free, key=lambda i: _age(self._arenas[i]), default=None)

    def _snapshot(self, state: State) -> None:
        place = self._place
        share, shares = (place.rank, place.world) if self._shared else (place.local_index, place.local_world)
        tensors = state.tensors()
        table = tuple(info for info, _ in tensors)
        mine = assign_shares(table, shares)[share]
        part = tuple(table[i] for i in mine)
        self._session.beat(Doing.SAVING)
        self._make_room(arena_nbytes(part))
        buffer = self._free_buffer()
        if buffer is None or not self._arenas:
            self.skipped += 1
            return
        began_s = time.monotonic()
        arena = self._arenas[buffer]
        arena.layout(part, share=share, shares=shares)
        arena.fill([tensors[i][1] for i in mine]).finish()
        arena.seal(state.step, state.commit_generation, extra=extra_of(state, mine))
        stall_s = time.monotonic() - began_s
        self._cost_s = stall_s if self._cost_s is None else 0.7 * self._cost_s + 0.3 * stall_s
        self._busy.add(buffer)
        self._session.send(
            messages.Filled(
                generation=state.commit_generation,
                step=state.step,
                buffer=buffer,
                nbytes=arena.header().nbytes,
                share=share,
                shares=shares,
                stall_s=stall_s,
            )
        )

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
                self._arenas.append(Arena.from_fd(self._offers.get(timeout=max(0.0, deadline_s - time.monotonic()))))
            except (queue.Empty, ArenaError):
                self._arenas = []
                return

    def _take_results(self) -> None:
        while True:
            try:
                message = self._results.get_nowait()
            except queue.Empty:
                return
            self._busy.discard(message.buffer)
            self._durable_s = message.seconds or self._durable_s


def _age(arena: Arena) -> tuple[int, int]:
    header = arena.header()
    return (header.generation, header.step) if header.whole else (-1, -1)
