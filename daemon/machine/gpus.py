"""Health of this node's GPUs: a self-test before the node accepts work, then NVML's error counters and events."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic.contract.records.reasons import Code, Text, reason
from elasticd.base.log import Log

SELF_TEST_S = 300.0
"""Time limit for the self-test of all GPUs, including the import of torch."""

LOOK_EVERY_S = 5.0
"""Interval between checks of the counters; events are received at once."""

SICK_XIDS = {
    48: "uncorrectable memory error",
    62: "internal micro-controller halt",
    64: "a bad row of memory could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "unrecovered memory error",
}
"""XIDs that indicate a faulty GPU. The others, such as 13 and 31, are mostly caused by a program, whose worker dies."""

TEST_AGAIN_S = 10.0
"""Until a self-test that could not be started, for want of memory or processes, is tried again."""


class GpuCheck:
    """A health check (`elasticd.plugins`), a look at which takes up to a second: it waits for NVML's events."""

    of_gpus = True

    def __init__(self, gpus: Sequence[int], log: Log, *, self_test: bool, problem: Text = "") -> None:
        """`problem`: why this node can take no work, such as GPUs that cannot be seen: it would train on its CPU. Its
        GPUs are then not tested, nor watched."""
        self._gpus = tuple(gpus)
        self._log = log
        self._tests = self_test and bool(gpus) and not problem
        self.reason: Text = reason(Code.SELF_TEST) if self._tests else problem
        """Why the node should accept no work; empty: it may. Once a GPU is faulty it stays so until the daemon
        restarts."""
        self.leave = not self._tests
        """Not during the self-test."""
        self.every_s = 0.0
        self._throttled: dict[int, bool] = {}
        self._steps = self._run()

    def look(self) -> Text:
        """What is known so far, at first; then after the self-test, and after each look at NVML."""
        next(self._steps, None)
        return self.reason

    def _run(self) -> Iterator[None]:
        yield
        if self._tests:
            yield from self._test()
        self.every_s = LOOK_EVERY_S
        try:
            import pynvml
        except ImportError:
            return
        while self._gpus and not self.reason:
            try:
                yield from self._watch(pynvml)
            except pynvml.NVMLError as error:
                self.reason = f"NVML: {error}"

    def _test(self) -> Iterator[None]:
        """A node that cannot start the self-test takes no work until it can."""
        while True:
            try:
                self.reason = self_test()
                self.leave = True
                return
            except OSError as error:
                self.reason, self.every_s = reason(Code.NOT_TESTED, str(error)), TEST_AGAIN_S
                self._log.error("gpu.not_tested", why=str(error))
                yield

    def _watch(self, nvml: Any) -> Iterator[None]:
        """Monitor until a GPU is faulty. Raises NVMLError."""
        nvml.nvmlInit()
        try:
            handles = {gpu: nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in self._gpus}
            events = nvml.nvmlEventSetCreate()
            try:
                wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
                listening = [
                    _tolerant(nvml, nvml.nvmlDeviceRegisterEvents, h, wanted, events) for h in handles.values()
                ]
                listens = any(heard is not _UNSUPPORTED for heard in listening)
                self.every_s = 0.0 if listens else LOOK_EVERY_S
                look_s = 0.0
                while not self.reason:
                    if not listens or time.monotonic() >= look_s:
                        look_s = time.monotonic() + LOOK_EVERY_S
                        self._look(nvml, handles)
                    else:
                        self._hear(nvml, events, handles)
                    yield
            finally:
                nvml.nvmlEventSetFree(events)
        finally:
            nvml.nvmlShutdown()

    def _hear(self, nvml: Any, events: Any, handles: dict[int, Any]) -> None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, 1000)
        except nvml.NVMLError_Timeout:
            return
        gpu = next((gpu for gpu, handle in handles.items() if _same(handle, event.device)), -1)
        if event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            self.reason = f"GPU {gpu}: uncorrectable memory error"
            return
        xid = int(event.eventData)
        if what := SICK_XIDS.get(xid):
            self.reason = f"GPU {gpu}: XID {xid}, {what}"
        else:
            self._log.warning("gpu.xid", gpu=gpu, xid=xid)

    def _look(self, nvml: Any, handles: dict[int, Any]) -> None:
        for gpu, handle in handles.items():
            try:
                if errors := _errors(nvml, handle):
                    self.reason = f"GPU {gpu}: {errors}"
                    return
                throttled = _throttled(nvml, handle)
            except nvml.NVMLError_GpuIsLost:
                self.reason = f"GPU {gpu}: fallen off the bus"
                return
            except nvml.NVMLError as error:
                self.reason = f"GPU {gpu}: NVML: {error}"
                return
            if throttled != self._throttled.get(gpu, False):
                self._throttled[gpu] = throttled
                self._log.warning("gpu.throttled" if throttled else "gpu.full_speed", gpu=gpu)


_UNSUPPORTED = object()
"""Answer for a counter that the card or an older driver lacks, or that this user may not read."""


def _tolerant(nvml: Any, ask: Callable[..., Any], *args: Any) -> Any:
    try:
        return ask(*args)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return _UNSUPPORTED


def _errors(nvml: Any, handle: Any) -> str:
    uncorrectable = _tolerant(
        nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    remapped = _tolerant(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if remapped is not _UNSUPPORTED:
        _, _, pending, failed = remapped
        if failed:
            return "a bad row of memory could not be remapped: replace it"
        if pending:
            return "a bad row of memory waits to be remapped: reset it"
    if uncorrectable is not _UNSUPPORTED and uncorrectable:
        return f"{uncorrectable} uncorrectable memory errors since its driver was loaded: reset it"
    return ""


def _throttled(nvml: Any, handle: Any) -> bool:
    """Whether heat or the power supply limits its clocks."""
    reasons = _tolerant(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    hardware = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    return reasons is not _UNSUPPORTED and bool(reasons & hardware)


def _same(handle: Any, other: Any) -> bool:
    """Whether two handles mean one device: they are pointers, and may differ but lead to the same place."""
    import ctypes

    if isinstance(handle, ctypes._Pointer):
        return ctypes.cast(handle, ctypes.c_void_p).value == ctypes.cast(other, ctypes.c_void_p).value
    return bool(handle == other)


def self_test(command: Sequence[str] = (sys.executable, "-m", "elastic.agent.workers.gpu_selftest")) -> str:
    """The problem with the GPUs; empty: none, or torch here cannot use them. Raises OSError if it cannot be started."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SELF_TEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the self-test of the GPUs did not end within {SELF_TEST_S:g} s"
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return f"the self-test of the GPUs failed with code {done.returncode}: {last}"
    return str(result["problem"])
