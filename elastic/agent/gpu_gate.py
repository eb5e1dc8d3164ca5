"""Whether a dead worker's memory on its GPU is free again, by NVML. Without GPUs or nvidia-ml-py: always."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import structlog

log = structlog.get_logger()

Holders = Callable[[int], Mapping[int, int]]
"""GPU index -> the processes on it: pid -> bytes."""


class Gate:
    """Holds a replacement back until its GPU is rid of the dead; in the loop's thread.

    A new worker would run out of memory, or meet a card that is still taking the old context down. The driver is done
    when the process is, as a rule: then this costs one look.
    """

    def __init__(self, gpus: Sequence[int], limit_s: float, holders: Holders) -> None:
        """`gpus`: GPU index of each slot. `limit_s`: longest wait; a miss is logged, and the worker comes anyway."""
        self._gpus = tuple(gpus)
        self._limit_s = limit_s
        self._holders = holders
        self._dead: dict[int, float] = {}

    def died(self, pid: int, now_s: float) -> None:
        """A worker is gone that may have held memory."""
        if self._gpus:
            self._dead[pid] = now_s

    def closed(self, slot: int, now_s: float) -> bool:
        """Whether a worker for `slot` has to wait."""
        if not self._dead or not 0 <= slot < len(self._gpus):
            return False
        gpu = self._gpus[slot]
        held = self._holders(gpu)
        waits = False
        for pid, died_s in tuple(self._dead.items()):
            if pid in held and now_s - died_s < self._limit_s:
                waits = True
            elif pid in held:
                log.warning(
                    "gpu.zombie", gpu=gpu, pid=pid, held_mb=held[pid] >> 20, dead_for_s=round(now_s - died_s, 1)
                )
                del self._dead[pid]
            elif now_s - died_s >= self._limit_s:
                del self._dead[pid]  # on no GPU that was asked about
        return waits


def gate(gpus: Sequence[int], limit_s: float) -> Gate:
    """For the GPUs of this agent's slots."""
    holders = nvml_holders() if gpus else None
    return Gate(gpus if holders else (), limit_s, holders or (lambda gpu: {}))


def nvml_holders() -> Holders | None:
    """NVML's list of processes, or None: no driver here, or no nvidia-ml-py.

    In a container with process ids of its own NVML names those of the host, or none: then nobody waits.
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
            return {}  # a lost GPU: the daemon sees that and says so
        return {process.pid: process.usedGpuMemory or 0 for process in found}

    return holders
