"""Health of this node's GPUs: a self-test before the node accepts work, then NVML's error counters and events."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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


class Health:
    """GPU health. `reason` may be read from any thread; the thread that executes `run` writes it."""

    def __init__(self, gpus: Sequence[int], log: Log, *, self_test: bool, problem: str = "") -> None:
        """`problem`: why this node can take no work, such as GPUs that cannot be seen: it would train on its CPU. Its
        GPUs are then not tested, nor watched."""
        self._gpus = tuple(gpus)
        self._log = log
        self._self_test = self_test and bool(gpus) and not problem
        self.reason: Text = reason(Code.SELF_TEST) if self._self_test else ""
        """Why the node should accept no work; empty: it may. Once a GPU is faulty it stays so until the daemon
        restarts."""
        self._testing = self._self_test
        self._stopped = threading.Event()
        self._throttled: dict[int, bool] = {}
        if problem:
            self._say(problem)

    @property
    def sick(self) -> Text:
        """As `reason`, but empty during the self-test: why jobs that run here should leave."""
        return "" if self._testing else self.reason

    def run(self) -> None:
        if not self._gpus:
            return
        if self._self_test:
            self._say(self._tested())
            self._testing = False
        try:
            import pynvml
        except ImportError:
            return
        while not self.reason and not self._stopped.is_set():
            try:
                self._watch(pynvml)
            except pynvml.NVMLError as error:
                self._say(f"NVML: {error}")

    def stop(self) -> None:
        self._stopped.set()

    def _tested(self) -> Text:
        """The result of the self-test, as `self_test`. A node that cannot start it takes no work until it can."""
        while not self._stopped.is_set():
            try:
                return self_test()
            except OSError as error:
                self.reason = reason(Code.NOT_TESTED, str(error))
                self._log.error("gpu.not_tested", why=str(error))
                self._stopped.wait(TEST_AGAIN_S)
        return self.reason

    def _say(self, why: Text) -> None:
        self.reason = why
        if why:
            self._log.error("gpu.sick", reason=why)

    def _watch(self, nvml: Any) -> None:
        """Monitor until a GPU is faulty or `stop` is called. Raises NVMLError."""
        nvml.nvmlInit()
        try:
            handles = {gpu: nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in self._gpus}
            events = nvml.nvmlEventSetCreate()
            try:
                wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
                listening = [
                    _tolerant(nvml, nvml.nvmlDeviceRegisterEvents, h, wanted, events) for h in handles.values()
                ]
                look_s = 0.0
                while not self.reason and not self._stopped.is_set():
                    if time.monotonic() >= look_s:
                        look_s = time.monotonic() + LOOK_EVERY_S
                        self._look(nvml, handles)
                    elif not any(heard is not _UNSUPPORTED for heard in listening):
                        self._stopped.wait(LOOK_EVERY_S)
                    else:
                        self._hear(nvml, events, handles)
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
            self._say(f"GPU {gpu}: uncorrectable memory error")
            return
        xid = int(event.eventData)
        if what := SICK_XIDS.get(xid):
            self._say(f"GPU {gpu}: XID {xid}, {what}")
        else:
            self._log.warning("gpu.xid", gpu=gpu, xid=xid)

    def _look(self, nvml: Any, handles: dict[int, Any]) -> None:
        for gpu, handle in handles.items():
            try:
                if errors := _errors(nvml, handle):
                    self._say(f"GPU {gpu}: {errors}")
                    return
                throttled = _throttled(nvml, handle)
            except nvml.NVMLError_GpuIsLost:
                self._say(f"GPU {gpu}: fallen off the bus")
                return
            except nvml.NVMLError as error:
                self._say(f"GPU {gpu}: NVML: {error}")
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
