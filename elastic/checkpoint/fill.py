"""Copying tensors into an arena: a memcpy on the CPU, pinned memory and a side stream on CUDA."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""(where in the arena, what)."""


class Fill:
    """A copy under way. `finish` returns when every byte has arrived; safe to call twice."""

    def __init__(self, events: Sequence[torch.cuda.Event] = (), watched: Sequence[torch.Tensor] = ()) -> None:
        """`watched`: must not be changed until `finish` has returned."""
        self._events = list(events)
        self._watched = [(tensor, tensor._version) for tensor in watched]
        self.torn = False
        """Somebody changed them all the same; known when `done`. A change through `.data` is not seen."""

    @property
    def done(self) -> bool:
        """Whether every byte has been seen to arrive: by `finish`, not by a look at the device."""
        return not self._events

    def finish(self) -> None:
        """Raises RuntimeError when the device has failed: the copy is then never done, however often it is asked."""
        while self._events:
            self._events[-1].synchronize()
            self._events.pop()
        self.torn = self.torn or any(tensor._version != version for tensor, version in self._watched)
        self._watched.clear()  # from here on the optimizer may


def fill(pairs: Sequence[Pair], volatile: Sequence[bool]) -> Fill:
    """Start copying each pair. CPU tensors are there on return; CUDA tensors after `finish`."""
    by_device: dict[torch.device, list[tuple[Pair, bool]]] = {}
    with torch.no_grad():
        for pair, eager in zip(pairs, volatile, strict=True):
            if pair[1].is_cuda:
                by_device.setdefault(pair[1].device, []).append((pair, eager))
        events = [_copy_cuda(device, some) for device, some in by_device.items()]
        _copy_cpu([pair for pair in pairs if not pair[1].is_cuda])
    return Fill(events, [source for some in by_device.values() for (_, source), eager in some if not eager])


_CHUNK_BYTES = 4 * 1024 * 1024
_HELPERS = 3
_WORTH_HELP_BYTES = 32 * 1024 * 1024

Move = tuple[int, int, int]
"""(to, from, bytes): one memmove."""


def _copy_cpu(pairs: Sequence[Pair]) -> None:
    """A memcpy of each dense tensor; torch for those with strides.

    Not torch's parallel copy for the dense ones: its threads meet at a barrier after every tensor, which on a busy
    machine costs several times the copy. Here each thread takes the next chunk, and nobody waits for a thread that
    the scheduler has put aside for longer than its one chunk.
    """
    chunks: deque[list[Move]] = deque()
    total = room = 0
    for to, source in pairs:
        if not source.is_contiguous() or source.is_conj() or source.is_neg() or source.device.type != "cpu":
            to.copy_(source.detach())
            continue
        left, at, start = source.numel() * source.element_size(), to.data_ptr(), source.data_ptr()
        total += left
        while left:
            if not room:
                chunks.append([])
                room = _CHUNK_BYTES
            part = min(left, room)
            chunks[-1].append((at, start, part))
            left, at, start, room = left - part, at + part, start + part, room - part
    # As many threads as torch itself would use: a job with a rank per core has that at one.
    helpers = min(torch.get_num_threads() - 1, _HELPERS) if total >= _WORTH_HELP_BYTES else 0
    threads = [threading.Thread(target=_move, args=(chunks,), daemon=True) for _ in range(helpers)]
    for thread in threads:
        thread.start()
    _move(chunks)
    for thread in threads:
        thread.join()


def _move(chunks: deque[list[Move]]) -> None:
    memmove = ctypes.memmove  # lets other threads run
    while True:
        try:
            chunk = chunks.popleft()
        except IndexError:
            return
        for to, start, nbytes in chunk:
            memmove(to, start, nbytes)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_cuda(device: torch.device, pairs: Sequence[tuple[Pair, bool]]) -> torch.cuda.Event:
    """Queue the copies on a side stream and return the event behind the last one.

    The side stream waits for what the current one has queued (the optimizer's step). Sources are recorded on it, so
    that torch's allocator does not hand their memory out before the copy is done. Volatile ones go first, and the
    current stream waits for those alone.
    """
    current = torch.cuda.current_stream(device)
    if (side := _streams.get(device)) is None:
        side = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for first in (True, False):
            for (to, source), eager in pairs:
                if eager is first:
                    to.copy_(source.detach(), non_blocking=True)
                    source.record_stream(side)
            if first and any(eager for _, eager in pairs):
                held = torch.cuda.Event()  # type: ignore[no-untyped-call]
                held.record(side)
                current.wait_event(held)
        done.record(side)
    return done


def register(address: int, nbytes: int, device: torch.device) -> str:
    """Pin the mapping at `address` for CUDA, so that copies into it run beside the kernels.

    Returns '', or why it could not be done: copies then work all the same, and the host waits for each. In a thread of
    its own, as CUDA keeps an error for the thread's next caller to trip over, and torch has no way to take it away.
    """
    said: list[str] = []

    def act() -> None:
        try:
            with torch.cuda.device(device):  # a new thread's would be the first GPU
                code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
            said.append(f"CUDA error {code}" if code else "")
        except RuntimeError as error:
            said.append(str(error).partition("\n")[0])

    thread = threading.Thread(target=act, name="elastic-register")
    thread.start()
    thread.join()
    return said[0]


def unregister(address: int) -> None:
    """Whatever CUDA says to it: where the device has failed it refuses, and the mapping goes next in any case."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
