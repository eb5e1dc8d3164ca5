"""Buffers of the agent, asked for and received: their memory outlives this process."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable

from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.memory.arena import Arena
from elastic.contract.worker import messages

ARENA_WAIT_S = 30.0
NO_MEMORY = -1


class ArenaRequests:
    """`take` is called in the monitor thread, `ask` in one thread at a time."""

    def __init__(self, send: Callable[[messages.Message], None], count: int, *, guest: bool = False) -> None:
        """`send`: to the agent. `count`: how many buffers it offers. `guest`: see `NeedArena`."""
        self._send, self._count, self._guest = send, count, guest
        self._offers: queue.SimpleQueue[tuple[messages.Arena, int]] = queue.SimpleQueue()
        self._request = 0
        """Number of the newest request."""

    def take(self, message: messages.Arena, descriptors: list[int]) -> None:
        for descriptor in descriptors or [NO_MEMORY]:
            self._offers.put((message, descriptor))

    def ask(self, nbytes: int, *, optional: bool) -> tuple[list[Arena], set[int]] | None:
        """(buffers of at least `nbytes` bytes, numbers of those that are still being written to disk); None: the agent
        does not provide them."""
        request = self._request = self._request + 1
        self._send(messages.NeedArena(nbytes=nbytes, request=request, optional=optional, guest=self._guest))
        arenas: dict[int, Arena] = {}
        busy: set[int] = set()
        deadline_s = time.monotonic() + ARENA_WAIT_S
        while len(arenas) < self._count:
            try:
                offer, descriptor = self._offers.get(timeout=max(0.0, deadline_s - time.monotonic()))
                if offer.request != request:
                    if descriptor != NO_MEMORY:
                        os.close(descriptor)  # the late answer to an earlier request that timed out or failed
                    continue
                if descriptor == NO_MEMORY:
                    raise ArenaError("the agent has no memory for it")
                arenas[offer.buffer] = Arena.from_fd(descriptor, warm=False)
                if offer.busy:
                    busy.add(offer.buffer)
            except (queue.Empty, ArenaError):
                for arena in arenas.values():
                    arena.close()
                return None
        return [arenas[buffer] for buffer in sorted(arenas)], busy
