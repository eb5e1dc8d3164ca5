"""The agent's end of snapshots, in the worker's own process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from elastic.checkpoint.arena import Arena
from elastic.core import messages


class Agent:
    """A session with nobody behind it. Owns the arenas, as the agent does; says that they are written when told to."""

    def __init__(self) -> None:
        self.save_wanted = self.stop_wanted = False
        self.arenas: list[Arena] = []
        self.filled: list[messages.Filled] = []
        self.unwritten: list[messages.Filled] = []
        self.no_memory = False
        self._handlers: dict[type, Callable[..., None]] = {}

    def on(self, kind: type, handler: Callable[..., None]) -> None:
        self._handlers[kind] = handler

    def beat(self, doing: Any) -> None: ...

    def send(self, message: messages.Message) -> None:
        if isinstance(message, messages.NeedArena):
            if not self.no_memory:
                self.arenas = [Arena.create(message.nbytes, warm=False) for _ in range(2)]
            self._handlers[messages.Arena](messages.Arena(nbytes=0), [os.dup(arena.fd) for arena in self.arenas])
        elif isinstance(message, messages.Filled):
            self.filled.append(message)
            self.unwritten.append(message)

    def wrote(self) -> None:
        """The oldest snapshot that is not on disk now is."""
        message = self.unwritten.pop(0)
        self._handlers[messages.Saved](messages.Saved(step=message.step, buffer=message.buffer, seconds=0.1), [])
