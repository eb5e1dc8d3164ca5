"""A stand-in for the module `pynvml`: the calls we use, with the errors that NVML documents for them."""

from __future__ import annotations

import queue
import types
from typing import Any


class NVMLError(Exception):
    pass


class NVMLError_Timeout(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_ResetRequired(NVMLError):
    def __str__(self) -> str:
        return "GPU requires restart"


class FakeNvml(types.ModuleType):
    """Put it into sys.modules as 'pynvml'. Handles are the indices themselves."""

    NVMLError = NVMLError
    NVMLError_Timeout = NVMLError_Timeout
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_GpuIsLost = NVMLError_GpuIsLost
    NVMLError_ResetRequired = NVMLError_ResetRequired
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8
    nvmlEventTypeDoubleBitEccError = 2
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.processes: dict[int, dict[int, int | None]] = {}
        self.uncorrectable: int | type[NVMLError] = 0
        self.remapped: tuple[int, int, int, int] | type[NVMLError] = (0, 0, 0, 0)
        self.throttle: int | type[NVMLError] = 0
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.hears: bool | type[NVMLError] = True
        """Whether it offers events; or the error that it returns for them."""

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'ab'[handle]}0000000-0000-0000-0000-000000000000"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        found = self.processes.get(handle, {})
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found.items()]

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlEventSetFree(self, events: str) -> None:
        assert events == "set"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        if self.hears is not True:
            raise self.hears or NVMLError_NotSupported

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        try:
            return self.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise NVMLError_Timeout from None

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return _value(self.uncorrectable)

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return _value(self.remapped)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return _value(self.throttle)

    def happens(self, gpu: int, xid: int) -> None:
        self.events.put(types.SimpleNamespace(device=gpu, eventType=8, eventData=xid))


def _value(found: Any) -> Any:
    if isinstance(found, type):
        raise found
    return found
