"""Snapshot backend of a worker without an agent: standalone, or under stock torchrun.

The same arenas, writer process and format on disk as with an agent; the script's own process owns them.
"""

from __future__ import annotations

import os
import sys

from elastic.checkpoint.format.errors import CheckpointError
from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.buffers import Buffers
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.client import WriterProcess
from elastic.checkpoint.saving.failures import FailuresInRow
from elastic.checkpoint.saving.versions import versions

from .checkpoint_scheduler import SnapshotPart


class LocalSnapshots:
    """One per rank; rank 0 commits. Failures are printed to stderr, as there is no status here, and not raised.

    Ranks need no collective, but all must put their parts of the same steps, with the same `generation`.
    """

    def __init__(
        self, directory: str, job: str, *, generation: int, rank: int = 0, world_size: int = 1, keep: int = 3
    ) -> None:
        self._directory = os.path.abspath(directory)
        self._job, self._generation, self._rank, self._world = job, generation, rank, world_size
        self._keep = keep
        self._writer = WriterProcess()
        self._buffers = Buffers()
        self._copied: SnapshotPart | None = None
        """The part whose copy is in progress."""
        self._in_flight: set[int] = set()
        self._versions = versions()
        self._failed_step = -1
        """Step of the newest save that has failed."""
        self.failing = FailuresInRow()
        self.durable_s = 0.0

    @property
    def busy(self) -> bool:
        """A save is in flight: another one would be skipped."""
        return bool(self._in_flight)

    def wanted(self) -> bool:
        return False

    def stops(self) -> bool:
        return False

    def free(self) -> bool:
        self._take(self._writer.results())
        return not self.busy

    def wait(self, limit_s: float = 600.0) -> None:
        self._take(self._writer.wait(limit_s))

    def failed(self, step: int) -> bool:
        self._take(self._writer.results())
        return self._failed_step == step

    def put(self, part: SnapshotPart) -> bool:
        self.settle()
        if not self.free():
            return False
        try:
            self._make_room(arena_nbytes(part.table))
            self._buffers.arenas[0].layout(part.table, shard=self._rank, shards=self._world)
            self._copied = part
            done = self._buffers.begin(0, part.tensors, volatile=part.volatile)
        except (OSError, CheckpointError) as error:
            self._fail(part.step, orders.describe(error))
            return False
        return not done or self._settle()

    @property
    def copying(self) -> bool:
        return self._buffers.copying

    @property
    def beside_s(self) -> float:
        return self._buffers.beside_s

    def settle(self) -> None:
        self._settle()

    def leave(self) -> None:
        self._settle()  # no other rank waits: there is one generation

    def prepare(self, part: SnapshotPart) -> None: ...

    def close(self) -> None:
        """Safe to call twice. Saves that are not durable yet are lost; `wait` first."""
        self._writer.close()
        self._buffers.replace(())

    def _settle(self) -> bool:
        """Returns False if the copy in progress could not be handed to the writer."""
        if (buffer := self._buffers.finish()) is None:
            return True
        assert self._copied is not None
        arena, part = self._buffers.arenas[buffer], self._copied
        try:
            arena.seal(part.step, self._generation, part.extra)
            self._order(arena, part.step)
        except (OSError, CheckpointError) as error:
            self._fail(part.step, orders.describe(error))
            return False
        return True

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
                wait_s=orders.COMMIT_WAIT_S if self._world > 1 else 0.0,
                keep=self._keep,
            )
            self._in_flight.add(self._writer.submit(commit))

    def _take(self, results: list[orders.Result]) -> None:
        last = "Commit" if self._rank == 0 else "Write"
        for result in results:
            self._in_flight.discard(result.id)
            if result.kind != last:  # rank 0's commit carries the error of its shard
                continue
            if result.error:
                self._fail(result.step, result.error)
            else:
                self.failing, self.durable_s = FailuresInRow(), result.seconds

    def _fail(self, step: int, error: str) -> None:
        self._failed_step = step
        self.failing.add(error)
        row = f" ({self.failing.count} in a row)" if self.failing.count > 1 else ""
        print(
            f"elastic: a checkpoint failed{row}: {error}; the one before stays, training goes on",
            file=sys.stderr,
            flush=True,
        )
