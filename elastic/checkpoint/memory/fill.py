"""Copying tensors into an arena during training: a thread on the CPU, pinned memory and a side stream on CUDA."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from .memcpy import WORTH_A_THREAD_BYTES, Memcpy, Pair, copy_now, movable
from .progress import Progress, unreported

REGISTER_S, REPORT_EVERY_S = 60.0, 0.5
"""How long registering memory with CUDA counts as progress, since it reports none itself; and how often it is
reported."""

EVENT_EVERY_BYTES = 256 * 1024 * 1024
"""Granularity at which the progress of a GPU copy is observed: 10 ms at 25 GB/s."""


class Fill:
    """A copy in progress. `finish` returns when every byte has arrived; safe to call twice."""

    def __init__(
        self,
        events: Sequence[torch.cuda.Event] = (),
        watched: Sequence[torch.Tensor] = (),
        memcpy: Memcpy | None = None,
        progress: Progress = unreported,
    ) -> None:
        """`watched`: tensors that must not change until `finish` has returned. `events`: one after every
        EVENT_EVERY_BYTES, the last one of a device after all of its copies."""
        self._progress = progress
        self._events = list(events)
        self._memcpy = memcpy
        self._watched = [(tensor, tensor._version) for tensor in watched]
        self.torn = False
        """Whether a watched tensor was changed; valid once `done`. A change through `.data` is not detected on CUDA; on
        the CPU it is detected if it precedes the copy of a chunk and affects the first bytes of that chunk."""
        self.beside_s = 0.0
        """CPU seconds that the copy took from concurrent work; valid once `done`."""

    @property
    def done(self) -> bool:
        """Whether every byte is known to have arrived: set by `finish`, the device is not queried."""
        return not self._events and self._memcpy is None

    def finish(self) -> None:
        """Wait for the copy. Raises RuntimeError if the device has failed: the copy is then never done, even on later
        calls."""
        self._wait()
        if self._memcpy is not None:
            self._memcpy.finish(self._progress)
            self.torn = self._memcpy.differs()
            self.beside_s = self._memcpy.beside_s
            self._memcpy = None
        self.torn = self.torn or any(tensor._version != version for tensor, version in self._watched)
        self._watched.clear()  # from here on the optimizer may change them

    def drop(self) -> None:
        """Stop copying: a thread on the CPU stops after its current chunk, GPU copies are waited for.

        `done` then tells whether everything has arrived. Raises RuntimeError if the device has failed.
        """
        if self._memcpy is None or self._memcpy.drop():
            self.finish()
        else:
            self._wait()

    def _wait(self) -> None:
        while self._events:
            self._events[0].synchronize()
            self._events.pop(0)
            self._progress(EVENT_EVERY_BYTES)


def fill(pairs: Sequence[Pair], volatile: Sequence[bool], progress: Progress = unreported) -> Fill:
    """Start copying each pair. Volatile, small and strided tensors on the CPU are copied on return; the rest after
    `finish`."""
    by_device: dict[torch.device, list[tuple[Pair, bool]]] = {}
    now: list[Pair] = []
    late: list[Pair] = []
    with torch.no_grad():
        for pair, eager in zip(pairs, volatile, strict=True):
            if pair[1].is_cuda:
                by_device.setdefault(pair[1].device, []).append((pair, eager))
            else:
                (now if eager or pair[1].is_inference() or not movable(pair[1]) else late).append(pair)
        events = [event for device, some in by_device.items() for event in _copy_cuda(device, some)]
        if sum(source.nbytes for _, source in late) < WORTH_A_THREAD_BYTES:
            now, late = now + late, []
        copy_now(now, progress)
        memcpy = Memcpy(late) if late else None
        if memcpy is not None:
            memcpy.begin()
    on_gpu = [source for some in by_device.values() for (_, source), eager in some if not eager]
    return Fill(events, on_gpu + [source for _, source in late], memcpy, progress)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_cuda(device: torch.device, pairs: Sequence[tuple[Pair, bool]]) -> list[torch.cuda.Event]:
    """Queue the copies on a side stream; the last of the events returned is behind all of them.

    The side stream waits for the work queued on the current one (the optimizer's step). Sources are recorded on it, so
    that torch's allocator does not reuse their memory before the copy is done. Volatile tensors are copied first, and
    the current stream waits for those only.
    """
    current = torch.cuda.current_stream(device)
    if (side := _streams.get(device)) is None:
        side = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    marks: list[torch.cuda.Event] = []
    unmarked = 0
    with torch.cuda.stream(side):
        for first in (True, False):
            for (to, source), eager in pairs:
                if eager is first:
                    to.copy_(source.detach(), non_blocking=True)
                    source.record_stream(side)
                    unmarked += source.nbytes
                    if unmarked >= EVENT_EVERY_BYTES:
                        unmarked = 0
                        marks.append(side.record_event())
            if first and any(eager for _, eager in pairs):
                current.wait_event(side.record_event())
        marks.append(side.record_event())
    return marks


def register(address: int, nbytes: int, device: torch.device, progress: Progress = unreported) -> str:
    """Pin the mapping at `address` for CUDA, so that copies into it overlap with kernels.

    Returns '', or the reason for a failure: copies then still work, but each blocks the host. Runs in a thread of its
    own, since CUDA keeps an error for the thread's next caller and torch has no way to clear it.
    """
    refusal: list[str] = []

    def act() -> None:
        try:
            with torch.cuda.device(device):  # a new thread starts with the first GPU
                code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
            refusal.append(f"CUDA error {code}" if code else "")
        except RuntimeError as error:
            refusal.append(str(error).partition("\n")[0])

    thread = threading.Thread(target=act, name="elastic-register")
    thread.start()
    deadline_s = time.monotonic() + REGISTER_S
    while thread.is_alive() and time.monotonic() < deadline_s:
        thread.join(REPORT_EVERY_S)
        progress(0)
    thread.join()
    return refusal[0] if refusal else "the thread that registers memory has failed, as its error above says"


def unregister(address: int) -> None:
    """Unregister the mapping. Errors are ignored: after a device failure CUDA refuses, and the mapping is closed in any
    case."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
