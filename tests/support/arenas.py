"""The agent's end of snapshots, in the worker's own process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from elastic.checkpoint.memory.arena import Arena
from elastic.contract.worker import messages
from elastic.worker.snapshots.agent_snapshots import SnapshotPart


class Agent:
    """A session without an agent process. Owns the arenas, as the agent does; reports them written when told to."""

    def __init__(self) -> None:
        self.save_wanted = self.stop_wanted = False
        self.arenas: list[Arena] = []
        self.filled: list[messages.Filled] = []
        self.unwritten: list[messages.Filled] = []
        self.no_memory = False
        self.progress: list[int] = []
        """Bytes, one entry for each sign of progress."""
        self._handlers: dict[type, Callable[..., None]] = {}

    def on(self, kind: type, handler: Callable[..., None]) -> None:
        self._handlers[kind] = handler

    def beat(self, doing: Any) -> None: ...

    def stood_still(self, seconds: float) -> None: ...

    def copied(self, nbytes: int) -> None:
        self.progress.append(nbytes)

    def send(self, message: messages.Message) -> None:
        if isinstance(message, messages.NeedArena):
            if self.no_memory:
                self._handlers[messages.Arena](messages.Arena(nbytes=0, request=message.request), [])
                return
            if not self.arenas or self.arenas[0].capacity < message.nbytes:
                self.arenas = [Arena.create(message.nbytes, warm=False) for _ in range(2)]
            self.offer(message.request)
        elif isinstance(message, messages.Filled):
            self.filled.append(message)
            self.unwritten.append(message)

    def offer(self, request: int = 0) -> None:
        """The answer to NeedArena, also to another worker than the one that filled them."""
        busy = {message.buffer for message in self.unwritten}
        for buffer, arena in enumerate(self.arenas):
            answer = messages.Arena(nbytes=arena.capacity, request=request, buffer=buffer, busy=buffer in busy)
            self._handlers[messages.Arena](answer, [os.dup(arena.fd)])

    def wrote(self) -> None:
        """The oldest snapshot that is not on disk now is."""
        message = self.unwritten.pop(0)
        self._handlers[messages.SaveResult](
            messages.SaveResult(step=message.step, buffer=message.buffer, seconds=0.1), []
        )


class NoBackend:
    """A snapshot backend that keeps the parts and copies nothing."""

    durable_s = 0.0
    copying = False
    beside_s = 0.0

    def __init__(self) -> None:
        self.parts: list[SnapshotPart] = []

    def wanted(self) -> bool:
        return False

    def stops(self) -> bool:
        return False

    def free(self) -> bool:
        return True

    def wait(self, limit_s: float) -> None: ...

    def copied(self) -> tuple[messages.CopyState, int]:
        return messages.CopyState.REPLICAS, -1

    def failed(self, step: int) -> bool:
        return False

    def put(self, part: SnapshotPart) -> bool:
        self.parts.append(part)
        return True

    def settle(self) -> None: ...

    def leave(self) -> None: ...

    def prepare(self, part: SnapshotPart) -> None: ...
