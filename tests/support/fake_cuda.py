"""A GPU that is not there: streams, events and copies that keep to what CUDA documents, over tensors of the CPU.

What is queued runs late: when it is waited for, or when `Device.drift` lets some of it happen. Within a stream in
order; between streams in any order but for the events waited for. So a missing wait shows as wrong bytes, or in `log`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elastic.checkpoint.memory import fill as fill_module

DEVICE = torch.device("cuda", 0)


class Broken(RuntimeError):
    """As torch says it of a device that has failed, each time it is asked."""

    def __init__(self) -> None:
        super().__init__("CUDA error: an illegal memory access was encountered")


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._at = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or self._device.current
        self._at = self._stream.queued
        self._device.log.append(f"event on {self._stream.name}")

    def synchronize(self) -> None:
        self._device.log.append("host waits")
        self._device.check()
        self.happen()

    def happen(self) -> None:
        if self._stream is not None:  # one that was never recorded is over
            self._stream.run_to(self._at)


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.name = name
        self.queued = 0
        self._ran = 0
        self._device = device
        self._queue: list[Callable[[], object]] = []

    def add(self, act: Callable[[], object]) -> None:
        self._queue.append(act)
        self.queued += 1

    def run_to(self, at: int) -> None:
        while self._ran < at:
            self._ran += 1
            self._queue.pop(0)()

    def drift(self, count: int) -> None:
        self.run_to(min(self.queued, self._ran + count))

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._device.log.append(f"{self.name} waits")
        stream, at = event._stream, event._at
        if stream is not None:
            self.add(lambda: stream.run_to(at))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._device)
        event._stream, event._at = other, other.queued
        self.wait_event(event)

    def synchronize(self) -> None:
        self._device.log.append(f"host waits for {self.name}")
        self._device.check()
        self.run_to(self.queued)


class Device:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = Stream(self, "main")
        self.sides: list[Stream] = []
        self.current = self.main
        self.broken = False
        self.refuses_to_pin = 0
        self.pinned: dict[int, int] = {}

    def check(self) -> None:
        if self.broken:
            raise Broken

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """`values` as if they lay on the device."""
        found = values.as_subclass(OnDevice)
        found.gpu = self  # type: ignore[attr-defined]
        return found

    def launch(self, name: str, act: Callable[[], object]) -> None:
        """A kernel on the main stream."""
        self.log.append(name)
        self.main.add(act)

    def drift(self, chance: random.Random) -> None:
        for stream in chance.sample([self.main, *self.sides], 1 + len(self.sides)):
            stream.drift(chance.randrange(4))

    @contextlib.contextmanager
    def in_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def new_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        self.sides.append(Stream(self, "side"))
        return self.sides[-1]

    # torch.cuda.cudart()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses_to_pin:
            self.pinned[address] = nbytes
        return self.refuses_to_pin

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


class OnDevice(torch.Tensor):
    """Says that it is on a GPU. A copy from it is queued in the current stream; anything else happens at once."""

    is_cuda = True  # type: ignore[assignment]
    device = DEVICE
    gpu: Device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[1], OnDevice) and not isinstance(args[0], OnDevice):
            to, source = args
            gpu = source.gpu
            assert kwargs == {"non_blocking": True}
            gpu.check()
            gpu.log.append("copy")

            def copy() -> None:
                with torch._C.DisableTorchFunctionSubclass():
                    to.copy_(source.as_subclass(torch.Tensor))

            gpu.current.add(copy)
            return to
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:
            return args[0].gpu.tensor(found)
        return found

    def record_stream(self, stream: Any) -> None:
        assert stream is self.gpu.current


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """torch.cuda, as far as snapshots use it."""
    device = Device()
    fakes: dict[str, Any] = {
        "current_stream": lambda device_=None: device.current,
        "Stream": device.new_stream,
        "Event": lambda: Event(device),
        "stream": device.in_stream,
        "device": lambda _: contextlib.nullcontext(),
        "cudart": lambda: device,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fill_module, "_streams", {})
    return device
