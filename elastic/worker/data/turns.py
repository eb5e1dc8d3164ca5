"""The turns of a loop over data: which batch each step takes, as a function of the step and of where the loop began."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from elastic.worker.link.misuse import MisuseValueError
from elastic.worker.state.parts.data_progress import DataProgress, LoopPlan

from .arguments import at_most, whole
from .containers import copied, moved
from .reading import CPU, Chosen, Reads, loaded
from .seeds import word
from .sharding import BatchPlan, rank_range


class LoopTurn(msgspec.Struct, frozen=True, gc=False):
    """One batch, of one or several steps."""

    key: Any
    """What a reader reads."""
    step: int
    """The first of its steps."""
    epoch: int
    size: int
    """Samples over all ranks."""
    last: bool
    """Of its epoch."""
    plan: LoopPlan


class Loop:
    """One loop over data, from `step` on."""

    def __init__(
        self,
        progress: DataProgress | None,
        step: int,
        *,
        epochs: Any,
        steps: Any,
        commits: Any = 1,
        allow_changed: bool = False,
    ) -> None:
        """`epochs`, `steps`: limits, counted from where the loop counts. `commits`: steps of each batch."""
        self.progress = DataProgress() if progress is None else progress
        self.step = step
        self.commits = whole("commits", commits, least=1)
        self._allow_changed = allow_changed
        self._steps = at_most("steps", steps)
        epochs = at_most("epochs", epochs)
        self._epochs = 1 if epochs is None and self._steps is None else epochs
        """None: as many as the steps take."""
        self.at: LoopPlan
        self._stop: float
        """The epoch with which it ends."""
        self.limit: float = math.inf
        """The step at which it ends, unless its epochs end before."""
        self.end = 0
        """The step at which it has ended."""

    def placed(self, numbers: dict[str, Any]) -> LoopPlan:
        """Where it counts from. To be called when it begins."""
        self.at = self.progress.place(numbers)
        self._stop = math.inf if self._epochs is None else self.progress.first_epoch + self._epochs
        if self._steps is not None:
            self.limit = self.at.begin + self._steps
        return self.at

    def _begins(self, plan: LoopPlan) -> None:
        self.progress.begin(self, plan, self.step, allow_changed=self._allow_changed)

    def regular(self, plan: BatchPlan) -> Iterator[LoopTurn]:
        """The keys are numbers of batches."""
        begin, commits, first = self.at.begin, self.commits, self.progress.first_epoch
        if self._epochs is not None:
            self.limit = min(self.limit, begin + self._epochs * plan.steps_per_epoch * commits)
        self.end = int(self.limit)
        loop_plan = msgspec.structs.replace(self.at, end=self.end)
        self._begins(loop_plan)
        number = max(0, self.step - begin) // commits
        while (step := begin + number * commits) < self.limit:
            batch = plan.at(number)
            yield LoopTurn(number, step, first + batch.epoch, batch.size, batch.last, loop_plan)
            number += 1

    def listed(
        self, make: Callable[[int, float], tuple[Sequence[Sequence[int]], dict[str, Any]]], share: Share
    ) -> Iterator[LoopTurn]:
        """`make(epoch, most)` returns the batches of an epoch, of which at most `most` are needed, and what is equal
        when the job goes on. The keys are `Chosen`."""
        epoch, since, begun = self.at.epoch, self.at.since, False
        while epoch < self._stop and since < self.limit:
            batches, numbers = make(epoch, (self.limit - since) / self.commits)
            next_one = since + len(batches) * self.commits
            end = min(self.limit, next_one) if epoch + 1 == self._stop else self.limit
            plan = msgspec.structs.replace(
                self.at,
                numbers={**self.at.numbers, **numbers},
                epoch=epoch,
                since=since,
                end=_int(end),
            )
            if not begun:
                self._begins(plan)
                begun = True
            start = 0
            for number, indices in enumerate(batches):
                step = since + number * self.commits
                if step + self.commits > self.step and step < self.limit:
                    key = share(step, epoch, start, indices)
                    yield LoopTurn(key, step, epoch, len(indices), number == len(batches) - 1, plan)
                start += len(indices)
            epoch, since = epoch + 1, next_one
        self.end = int(min(self.limit, since))

    def drawn(
        self, begin: Callable[[int], Any], draw: Callable[[Any, int], bool], length: int | None
    ) -> Iterator[LoopTurn]:
        """`begin(epoch)` begins an epoch, and `draw(begun, step)` takes its next batch, if there is one. Those of the
        steps so far are taken in vain. `length`: batches of an epoch, if that is known."""
        epoch, since, known = self.at.epoch, self.at.since, {"length": length}
        plan = msgspec.structs.replace(self.at, numbers={**self.at.numbers, **known}, end=_int(self.limit))
        self._begins(plan)
        while epoch < self._stop and since < self.limit:
            plan = msgspec.structs.replace(plan, epoch=epoch, since=since)
            begun, step = begin(epoch), since
            while step < self.limit and draw(begun, step):
                if step + self.commits > self.step:
                    yield LoopTurn(step, step, epoch, 0, False, plan)
                step += self.commits
            if step == since:
                raise MisuseValueError(f"the loader of job.steps gives nothing in epoch {epoch}")
            epoch, since = epoch + 1, step
        self.end = int(min(self.limit, since))

    def run(
        self,
        turns: Iterator[LoopTurn],
        reader: Reads,
        *,
        num_workers: int,
        pin_memory: bool,
        device: torch.device = CPU,
        **options: Any,
    ) -> Iterator[tuple[LoopTurn, int, tuple[int, ...], Any]]:
        """(turn, step, indices, data) of each step."""
        waiting: deque[LoopTurn] = deque()

        def keys() -> Iterator[Any]:
            for turn in turns:
                waiting.append(turn)
                yield turn.key

        plan, done, commits = None, False, self.commits
        try:
            with loaded(reader, keys(), num_workers, pin_memory, **options) as ahead:
                for indices, data in ahead:
                    turn = waiting.popleft()
                    if turn.plan is not plan:
                        plan = turn.plan
                        self.progress.moves(self, plan)
                    step, next_one = turn.step, turn.step + commits
                    if step < self.step:
                        step = self.step  # of a batch of several, where the loop begins
                    while step < next_one and step < self.limit:
                        # Each step has the batch as it was read: the one before may have changed its tensors.
                        own = data if device.type != "cpu" or step == next_one - 1 else copied(data)
                        reader.seed_loop(step)
                        yield turn, step, indices, moved(own, device)
                        step += 1
            if self.progress.in_round:
                reader.seed_loop(self.end)  # what ends the round may draw
            done = True
        finally:
            self.progress.ends(self, self.end if done else None)


def _int(end: float) -> int | None:
    return None if end == math.inf else int(end)


Share = Callable[[int, int, int, Sequence[int]], Chosen]
"""(step, epoch, position of the first sample, samples of the batch) -> this rank's."""


def shared_out(rank: int, world_size: int, seed: int) -> Share:
    """Each rank has a contiguous part."""

    def share(step: int, epoch: int, start: int, indices: Sequence[int]) -> Chosen:
        first, stop = rank_range(0, len(indices), rank, world_size)
        return Chosen(step, word(seed, 0, epoch), start + first, tuple(indices[first:stop]), indices[0])

    return share


def own(rank: int, seed: int) -> Share:
    """The whole batch is this rank's."""

    def share(step: int, epoch: int, start: int, indices: Sequence[int]) -> Chosen:
        return Chosen(step, word(seed, 3, epoch, rank), start, tuple(indices), indices[0])

    return share
