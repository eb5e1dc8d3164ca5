"""`train_recorded.py` as a job on GPUs, on a machine without one: "cuda" is the CPU, and gloo carries the sums.

Agent and worker take the paths of NCCL. What an abort aborts, and what is asked whether a collective has timed out, is
a stand-in of torch's back end. Faults are ordered by files in the record:

    hang        "RANK RANK …": the next abort in each of these ranks never returns
    linger      "PID PID …": aborts return when another process than these has started CUDA, or after LINGER_S
    illegal     "RANK RANK …": from its next wait on, CUDA answers in these ranks with the error that sticks
    timed-out   "GENERATION": torch's watchdog has noted a time-out in the groups of that generation
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
import threading
import time
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType

from elastic.worker.comm import nccl
from elastic.worker.comm.group import Group

HERE = pathlib.Path(__file__).parent
RECORD = pathlib.Path("record")
LINGER_S = 2.5


class Communicator:
    def __init__(self, rank: int, generation: int) -> None:
        self._rank = rank
        self._generation = generation

    def abort(self) -> None:
        kernels_gone.clear()
        self._abort()
        kernels_gone.set()

    def _abort(self) -> None:
        if self.struck_by("hang"):
            threading.Event().wait()  # as an `ncclCommAbort` whose proxy thread does not end
        linger = RECORD / "linger"
        if linger.exists():
            known, end_s = linger.read_text().split(), time.monotonic() + LINGER_S
            while not (new := started_cuda() - set(known)) and time.monotonic() < end_s:
                time.sleep(0.005)
            (RECORD / f"lingered.{self._rank}").write_text(" ".join(new))

    def struck_by(self, name: str) -> bool:
        order, struck = RECORD / name, RECORD / f"{name}.{self._rank}"
        if not order.exists() or str(self._rank) not in order.read_text().split() or struck.exists():
            return False
        struck.touch()
        return True

    def get_error(self) -> ErrorType:
        order = RECORD / "timed-out"
        struck = order.exists() and order.read_text() == str(self._generation)
        return ErrorType.TIMEOUT if struck else ErrorType.SUCCESS


def started_cuda() -> set[str]:
    return {path.suffix[1:] for path in RECORD.glob("cuda.*")}


kernels_gone = threading.Event()
"""What `torch.cuda.synchronize` waits for: here an abort that does not return is one whose kernels do not end."""

formed: list[Communicator] = []
"""Of this process's newest group."""


class Stream:
    """Of the card, and an event on it: once a kernel has failed, each call says so."""

    broken = False

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        Stream.broken = Stream.broken or any(communicator.struck_by("illegal") for communicator in formed)
        if Stream.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def install() -> None:
    sys.path.insert(0, str(HERE.parent / "gpu"))
    import smoke

    smoke.install()
    torch.cuda.set_device = lambda device: (RECORD / f"cuda.{os.getpid()}").touch()
    torch.cuda.Event = torch.cuda.current_stream = Stream
    torch.cuda.synchronize = lambda device: kernels_gone.wait() and None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.is_initialized = lambda: Stream.broken
    form = Group._init

    def init(self: Group) -> None:
        form(self)
        formed[:] = [Communicator(self.rank, self.generation)]
        self.backend = "nccl"  # from here on
        nccl.watch_time_out(self._over, self._timeout_s, self.generation, self.rank)

    Group._init = init  # type: ignore[method-assign]
    nccl.communicators = lambda: list(formed)
    nccl.LOOK_S = 0.05


if __name__ == "__main__":
    install()
    sys.argv += ["--record", str(RECORD)]
    runpy.run_path(str(HERE / "train_recorded.py"), run_name="__main__")
