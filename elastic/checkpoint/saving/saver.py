"""Checkpoints for a script that runs without an agent: standalone, or under stock torchrun.

The same arenas, writer process and format on disk; the script's own process owns them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.checkpoint.format.errors import CheckpointError
from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.buffers import Buffers
from elastic.checkpoint.stored.find import newest_generation
from elastic.contract.worker.tensor_table import Table

from . import orders
from .client import WriterProcess

if TYPE_CHECKING:
    import torch
import re

ESCALATE_AFTER = 3
"""From this many in a row they are reported as errors."""


@dataclass(slots=True)
class FailuresInRow:
    """Replaced by a new one after a success."""

    error: str | None = None
    """Of the last one."""
    count: int = 0
    last: tuple[int, int] | None = None
    """(generation, step) of the last one: its shard and its commit may both report the failure."""
    began: tuple[int, float] = (0, 0.0)
    """Step and time of day of the first one of the present kind: all of a kind are one incident."""
    _kind: str = ""

    def add(self, error: str, generation: int = 0, step: int = 0, wall_s: float = 0.0) -> bool:
        """Returns False if this one is counted already. Step 0 or less: no particular checkpoint."""
        if step > 0 and self.last == (generation, step):
            return False
        self.error, self.count, self.last = error, self.count + 1, (generation, step)
        if (kind := re.sub(r"[0-9]+", "", error)) != self._kind:
            self._kind, self.began = kind, (step, wall_s)
        return True

    @property
    def escalate(self) -> bool:
        return self.count >= ESCALATE_AFTER


def versions() -> dict[str, str]:
    """Versions recorded in the manifest."""
    found = {"python": platform.python_version()}
    for name in ("elasticd", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def next_generation(directory: str, job: str) -> int:
    """A number above all generations in `directory`, so that this run's checkpoints are newer than those of earlier
    runs, and share no shard with what those have left unfinished."""
    return 1 + newest_generation(directory, job)


@dataclass(slots=True)
class Counts:
    """Outcome of the saves so far."""

    started: int = 0
    durable: int = 0
    skipped: int = 0
    """Requested while another was in flight."""
    failed: int = 0
    failing: FailuresInRow = field(default_factory=FailuresInRow)
    last_seconds: float = 0.0


class LocalSaver:
    """One per rank. `rank` saves shard `rank` of `world_size`; rank 0 commits. Failures are counted, not raised.

    Ranks need no collective, but all must call `save` for the same steps with the same `generation`.
    """

    def __init__(
        self,
        directory: str,
        job: str,
        *,
        generation: int,
        rank: int = 0,
        world_size: int = 1,
        keep: int = 3,
        keep_every_steps: int = 0,
        wait_for_others_s: float = 60.0,
    ) -> None:
        self._directory = os.path.abspath(directory)
        self._job, self._generation, self._rank, self._world = job, generation, rank, world_size
        self._keep, self._keep_every_steps = keep, keep_every_steps
        self._wait_for_others_s = wait_for_others_s
        self._writer = WriterProcess()
        self._buffers = Buffers()
        self._copied: tuple[int, Mapping[str, Any] | None] = 0, None
        """Step and other state of the copy in progress."""
        self._in_flight: set[int] = set()
        self._versions = versions()
        self.counts = Counts()
        self.failed_step = -1
        """Step of the newest save that has failed."""

    @property
    def busy(self) -> bool:
        """A save is in flight: another one would be skipped."""
        return bool(self._in_flight)

    def save(
        self,
        step: int,
        table: Table,
        tensors: Sequence[torch.Tensor],
        extra: Mapping[str, Any] | None = None,
        *,
        volatile: Collection[int] = (),
    ) -> bool:
        """Copy this rank's shard and have it written in the background. False: skipped, or failed at once.

        `table` and `tensors` are those of this rank's shard (see `layout`). The copy is complete on return.
        """
        if not self.begin(step, table, tensors, extra, volatile=volatile):
            return False
        return self.settle()

    def begin(
        self,
        step: int,
        table: Table,
        tensors: Sequence[torch.Tensor],
        extra: Mapping[str, Any] | None = None,
        *,
        volatile: Collection[int] = (),
    ) -> bool:
        """As `save`, but a large copy is only started: call `settle` before `tensors` are changed.

        Tensors whose index is in `volatile` may be changed at once (on a GPU by the current stream), see `Buffers`.
        """
        self.settle()
        self.poll()
        if self._in_flight:
            self.counts.skipped += 1
            return False
        try:
            self._make_room(arena_nbytes(table))
            self._buffers.arenas[0].layout(table, shard=self._rank, shards=self._world)
            self._copied = step, extra
            done = self._buffers.begin(0, tensors, volatile=volatile)
        except (OSError, CheckpointError) as error:
            self._fail(step, orders.describe(error))
            return False
        return self.settle() if done else True

    @property
    def copying(self) -> bool:
        """A copy was started and is not settled."""
        return self._buffers.copying

    @property
    def beside_s(self) -> float:
        """CPU seconds that the last copy took from concurrent work."""
        return self._buffers.beside_s

    def settle(self) -> bool:
        """Wait until the copy in progress is complete, and have it written. False: that failed. Raises RuntimeError if
        the device failed: that save is dropped."""
        if (buffer := self._buffers.finish()) is None:
            return True
        arena, (step, extra) = self._buffers.arenas[buffer], self._copied
        try:
            arena.seal(step, self._generation, extra)
            self._order(arena, step)
        except (OSError, CheckpointError) as error:
            self._fail(step, orders.describe(error))
            return False
        self.counts.started += 1
        return True

    def poll(self) -> list[orders.Result]:
        """Process the writer's results. Never blocks."""
        return self._take(self._writer.results())

    def wait(self, timeout_s: float = 600.0) -> Counts:
        """Wait until all saves are durable or have failed, at most `timeout_s`: call it at the end of the script."""
        self._take(self._writer.wait(timeout_s))
        return self.counts

    def close(self) -> None:
        """Safe to call twice. Saves that are not durable yet are lost; `wait` first."""
        self._writer.close()
        self._buffers.replace(())

    def _make_room(self, nbytes: int) -> None:
        """One buffer: it is filled while no save is in flight."""
        if not self._buffers.fits(nbytes):
            self._writer.submit(orders.Forget())
            self._buffers.replace(())
            self._buffers.replace([Arena.create(nbytes)])

    def _order(self, arena: Arena, step: int) -> None:
        write = orders.Write(directory=self._directory, job=self._job, step=step, generation=self._generation)
        self._in_flight.add(self._writer.submit(write, arena))
        if self._rank == 0:
            commit = orders.Commit(
                directory=self._directory,
                job=self._job,
                step=step,
                generation=self._generation,
                shards=self._world,
                world_size=self._world,
                versions=self._versions,
                wait_s=self._wait_for_others_s if self._world > 1 else 0.0,
                keep=self._keep,
                keep_every_steps=self._keep_every_steps,
            )
            self._in_flight.add(self._writer.submit(commit))

    def _take(self, results: list[orders.Result]) -> list[orders.Result]:
        last = "Commit" if self._rank == 0 else "Write"
        for result in results:
            self._in_flight.discard(result.id)
            if result.error and result.kind == last:  # rank 0's commit carries the error of its shard
                self._fail(result.step, result.error)
            elif result.kind == last and result.ok:
                self.counts.durable += 1
                self.counts.failing = FailuresInRow()
                self.counts.last_seconds = result.seconds
        return results

    def _fail(self, step: int, error: str) -> None:
        self.failed_step = step
        self.counts.failed += 1
        self.counts.failing.add(error)
