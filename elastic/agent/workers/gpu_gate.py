"""Whether a dead worker's memory on its GPU is free again, by NVML. Always true without GPUs or nvidia-ml-py."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import structlog

log = structlog.get_logger()

Holders = Callable[[int], Mapping[int, int]]
"""GPU index -> GPU memory of the processes on it: pid -> bytes."""


class Gate:
    """Holds a replacement worker back until no dead worker holds memory of its GPU; used in the loop's thread.

    Otherwise the new worker might run out of memory, or use a GPU that is still tearing down the old context. The
    driver is usually done when the process is gone: then this costs one query.
    """

    def __init__(self, gpus: Sequence[int], limit_s: float, holders: Holders) -> None:
        """`gpus`: GPU index of each slot. `limit_s`: longest wait; then a warning is logged and the worker starts."""
        self._gpus = tuple(gpus)
        self._limit_s = limit_s
        self._holders = holders
        self._dead: dict[int, float] = {}

    def died(self, pid: int, now_s: float) -> None:
        """A worker that may have held GPU memory is gone."""
        if self._gpus:
            self._dead[pid] = now_s

    def closed(self, slot: int, now_s: float) -> bool:
        """Whether a worker for `slot` must wait."""
        if not self._dead or not 0 <= slot < len(self._gpus):
            return False
        gpu = self._gpus[slot]
        memory = self._holders(gpu)
        waits = False
        for pid, died_s in tuple(self._dead.items()):
            if pid in memory and now_s - died_s < self._limit_s:
                waits = True
            elif pid in memory:
                log.warning(
                    "gpu.zombie", gpu=gpu, pid=pid, held_mb=memory[pid] >> 20, dead_for_s=round(now_s - died_s, 1)
                )
                del self._dead[pid]
            elif now_s - died_s >= self._limit_s:
                del self._dead[pid]  # on no GPU that was queried
        return waits


def gate(gpus: Sequence[int], limit_s: float) -> Gate:
    """The gate for the GPUs of this agent's slots."""
    holders = nvml_holders() if gpus else None
    return Gate(gpus if holders else (), limit_s, holders or (lambda gpu: {}))


def nvml_holders() -> Holders | None:
    """NVML's list of processes, or None: no driver here, or no nvidia-ml-py.

    In a container with its own pid namespace NVML reports the host's pids, or none: then no worker waits.
    """
    if not os.path.exists("/dev/nvidiactl"):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        log.info("gpu.nvml_missing", hint="pip install nvidia-ml-py")
        return None
    except pynvml.NVMLError as error:
        log.warning("gpu.nvml_fails", error=str(error))
        return None

    def holders(gpu: int) -> dict[int, int]:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            return {}  # a lost GPU: the daemon detects and reports that
        return {process.pid: process.usedGpuMemory or 0 for process in found}

    return holders
