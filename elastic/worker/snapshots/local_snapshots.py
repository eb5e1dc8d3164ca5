"""Snapshot backend of a worker without an agent: standalone, or under stock torchrun.

As with an agent, but the saver, its arenas and its writer process are the script's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable

from elastic.checkpoint.format.errors import ArenaError, CheckpointError
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.saver import Failed, Outcome, Saver
from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.reasons import Code, Text, codes, reason
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.contract.worker.beat import Doing

from .agent_snapshots import AgentSnapshots, SnapshotPart


class OwnSaver:
    """In place of a session with an agent: a saver in this process, for one rank."""

    save_wanted = stop_wanted = False

    def __init__(self, rules: Checkpoint, job: str, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._handlers: dict[type[messages.Message], Callable[[messages.Message, list[int]], None]] = {}
        self.saver = Saver(rules, job, self._tell, _say, buffers=1, patience_s=math.inf)

    def on(self, kind: type[messages.Message], handler: Callable[[messages.Message, list[int]], None]) -> None:
        self._handlers[kind] = handler

    def _tell(self, _: int, message: messages.Message, descriptors: tuple[int, ...]) -> None:
        copies: list[int] = []
        with contextlib.suppress(OSError):  # without its descriptor, an offer of a buffer is none
            copies += map(os.dup, descriptors)
        self._handlers[type(message)](message, copies)

    def send(self, message: messages.Message) -> None:
        match message:
            case messages.NeedArena(nbytes=nbytes, request=request):
                self.saver.need_arena(0, 0, nbytes, request=request)
            case messages.Filled():
                self.saver.filled(0, message, lead=self._rank == 0, world_size=self._world_size)

    def beat(self, doing: Doing) -> None: ...
    def copied(self, nbytes: int) -> None: ...
    def stood_still(self, seconds: float) -> None: ...


class LocalSnapshots(AgentSnapshots):
    """One per rank; rank 0 commits. Failures are printed to stderr, as there is no status here, and not raised.

    Ranks need no collective, but all must put their parts of the same steps, with the same `generation`.
    """

    def __init__(
        self, directory: str, job: str, *, generation: int, rank: int = 0, world_size: int = 1, keep: int = 3
    ) -> None:
        own = OwnSaver(Checkpoint(dir=os.path.abspath(directory), keep=keep), job, rank, world_size)
        super().__init__(own, buffers=1)
        self._generation, self.saver = generation, own.saver

    def put(self, part: SnapshotPart) -> bool:
        self.settle()
        failures = self.saver.last.failing.count
        error: Text = ""
        try:
            if super().put(replace(part, commit_generation=self._generation)):
                return True
            if not self._buffers.arenas:
                error = reason(Code.NO_SHARED_MEMORY)
        except (OSError, CheckpointError) as raised:
            error = orders.describe(raised)
        if error and self.saver.last.failing.count == failures:  # the saver has not said it
            self.saver.fail(self._generation, part.step, error)
        return False

    def _unsealed(self, part: SnapshotPart, error: ArenaError) -> None:
        self.saver.fail(part.commit_generation, part.step, str(error))

    def wait(self, limit_s: float = 600.0) -> None:
        """Return when all that was put is durable or has failed, or after `limit_s` seconds."""
        until_s = time.monotonic() + limit_s
        self.saver.finish(lambda: until_s, lambda: None)

    def failed(self, step: int) -> bool:
        return super().failed(step) or self.saver.last.failing.last == (self._generation, step)

    def _take_results(self) -> None:
        self.saver.readable()
        super()._take_results()

    def close(self) -> None:
        """Safe to call twice. Saves that are not durable yet are lost; `wait` first."""
        self._prepared()
        self.saver.close()
        self._buffers.replace(())


def _say(outcome: Outcome) -> None:
    if isinstance(outcome, Failed):
        then = "" if Code.NOT_DURABLE in codes(outcome.error) else ", training goes on"
        print(f"elastic: a checkpoint failed: {outcome.error}; the one before stays{then}", file=sys.stderr, flush=True)
