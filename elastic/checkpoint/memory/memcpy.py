"""Copying CPU tensors: at once by several threads, or by one thread during training.

torch's parallel copy is not used: its threads synchronise at a barrier after every tensor, which on a busy machine
costs several times the copy. Here each thread takes the next chunk, so that a preempted thread delays the copy by at
most its one chunk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from .progress import Progress, unreported

Pair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source)."""

Move = tuple[int, int, int]
"""(to, from, bytes): one memmove."""

WORTH_A_THREAD_BYTES = 16 * 1024 * 1024
"""Below this a copy takes some 2 ms, and a thread for it costs the step more than it saves."""
_CHUNK_BYTES = 4 * 1024 * 1024
_HELPERS = 3
_WORTH_HELP_CHUNKS = 8
_PROBE_BYTES = 64
_LAST_CHUNK_S, _REPORT_EVERY_S = 60.0, 0.5
"""How long waiting for chunks in progress counts as progress, and how often it is reported."""
_NICER = 10
"""Nice increment of the background thread: it runs on the CPU time that training leaves."""


def movable(tensor: torch.Tensor) -> bool:
    """Whether its bytes in CPU memory are laid out as in a file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def device_type(tensor: torch.Tensor) -> str:
    """`tensor.device.type`, without the object and string that it creates: they would dominate the cost of a small
    tensor."""
    return "cpu" if tensor.is_cpu else tensor.device.type


def copy_now(pairs: Sequence[Pair], progress: Progress = unreported) -> None:
    """Copy each pair at once: dense tensors by memcpy, those with strides by torch."""
    dense: list[Pair] = []
    for to, source in pairs:
        if movable(source):
            dense.append((to, source))
        else:
            to.copy_(source.detach())
            progress(source.nbytes)
    Memcpy(dense).finish(progress)


class Memcpy:
    """A copy of `movable` tensors. Nothing happens before `begin` or `finish`; main thread only."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs  # keeps them alive while their addresses are in use
        self._plan([(to.data_ptr(), what.data_ptr(), what.nbytes) for to, what in pairs])

    @classmethod
    def of(cls, moves: Iterable[Move]) -> Memcpy:
        """A copy of raw memory, which the caller keeps alive until the end."""
        memcpy = cls(())
        memcpy._plan(moves)
        return memcpy

    def _plan(self, moves: Iterable[Move]) -> None:
        chunks = _chunks(moves)
        self._left = deque(chunks)
        self._probes = [(to, ctypes.string_at(start, min(nbytes, _PROBE_BYTES))) for (to, start, nbytes), *_ in chunks]
        self._moved: deque[int] = deque()
        self._threads: list[threading.Thread] = []
        self.beside_s = 0.0
        """CPU seconds used by `begin`'s thread, which training may have lacked. Valid after the end."""

    def begin(self) -> None:
        """Start a thread that copies concurrently with the caller."""
        self._help(self._beside)

    def finish(self, progress: Progress = unreported) -> None:
        """Returns when every byte has arrived; the calling thread helps. Raises RuntimeError if a copying thread has
        died."""
        # As many threads as torch itself would use: one, in a job with a rank per core.
        helpers = min(torch.get_num_threads() - 1, _HELPERS) if len(self._left) >= _WORTH_HELP_CHUNKS else 0
        while len(self._threads) < helpers and self._help(lambda: self._move(progress)):
            pass
        self._move(progress)
        deadline_s = time.monotonic() + _LAST_CHUNK_S
        for thread in self._threads:
            # At low priority on a busy machine, one chunk can take seconds: that is no hang of this thread.
            while thread.is_alive() and time.monotonic() < deadline_s:
                thread.join(_REPORT_EVERY_S)
                progress(0)
        if not self.drop():
            raise RuntimeError("a thread that copied a snapshot has died")

    def drop(self) -> bool:
        """Stop after the chunks already begun. Returns whether every byte has arrived all the same."""
        self._left.clear()
        for thread in self._threads:
            thread.join()  # one chunk each
        self._threads.clear()
        return len(self._moved) == len(self._probes)

    def differs(self) -> bool:
        """Whether a chunk was copied with other first bytes than its source had before the copy began. Valid after the
        end."""
        return any(ctypes.string_at(to, len(was)) != was for to, was in self._probes)

    def _help(self, work: object) -> bool:
        thread = threading.Thread(target=work, name="elastic-copy", daemon=True)  # type: ignore[arg-type]
        try:
            thread.start()
        except RuntimeError:
            return False  # the system has no thread to spare: `finish` copies alone
        self._threads.append(thread)
        return True

    def _beside(self) -> None:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + _NICER, 19))
        self._move()
        self.beside_s = time.thread_time()

    def _move(self, progress: Progress = unreported) -> None:
        memmove = ctypes.memmove  # releases the GIL
        while True:
            try:
                chunk = self._left.popleft()
            except IndexError:
                return
            for to, start, nbytes in chunk:
                memmove(to, start, nbytes)
            self._moved.append(1)
            progress(sum(nbytes for *_, nbytes in chunk))


def _chunks(moves: Iterable[Move]) -> list[list[Move]]:
    """Split into chunks of at most `_CHUNK_BYTES`; small tensors share one."""
    chunks: list[list[Move]] = []
    room = 0
    for at, start, left in moves:
        if 0 < left < room:
            chunks[-1].append((at, start, left))
            room -= left
            continue
        while left:
            if not room:
                chunks.append([])
                room = _CHUNK_BYTES
            part = min(left, room)
            chunks[-1].append((at, start, part))
            left, at, start, room = left - part, at + part, start + part, room - part
    return chunks
