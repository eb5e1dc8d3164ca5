"""Which processes belong to which worker: its children, theirs, and those that have left its session or lost their
parent.

The agent is the subreaper of its workers: a process whose parent dies becomes the agent's child. So whatever a worker
leaves behind is found among the agent's children, in whatever session. It belongs to the worker whose session it is
in, whose mark stands in its environment, or below which it was seen; one that belongs to a living worker, as a service
that the script has detached, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

MARK = b"ELASTIC_WORKER_PID="
"""As `worker.session` sets it: inherited by what a worker executes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One process. Its number alone may be another's later."""

    pid: int
    started: int
    """Clock ticks since boot."""


class Descendants:
    """To be told of the workers; asked for what the dead ones have left behind."""

    def __init__(self) -> None:
        self._of: dict[Seen, int] = {}
        """Descendant -> process id of its worker."""
        self._workers: set[int] = set()
        """Process ids of all workers there ever were."""

    def look(self, workers: Collection[int]) -> None:
        """Note who descends from whom; to be called every few seconds."""
        self._workers.update(workers)
        seen = {process: worker for process, worker in self._of.items() if _seen(process.pid) == process}
        for worker in workers:
            for pid in _descendants(worker):
                if (process := _seen(pid)) is not None:
                    seen[process] = worker
        self._of = seen

    def orphans(self, ours: Iterable[int], living: Collection[int]) -> list[Seen]:
        """Those of `ours` that belong to no worker of `living`: children of the agent that it has not started."""
        self._workers.update(living)
        return [process for pid in ours if (process := _seen(pid)) and not self._belongs(process, living)]

    def _belongs(self, process: Seen, living: Collection[int]) -> bool:
        # The session last: one that a service has made for itself may have the number that a dead worker had.
        for worker in (self._of.get(process), _marked(process.pid), session(process.pid)):
            if worker in self._workers:
                return worker in living
        # Gone from its worker's session between two looks, without its environment: it may be that of a living one.
        return bool(living)


def end(process: Seen) -> bool:
    """SIGKILL, to this very process and to no other that has its number by now. Whether it was there."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if _seen(process.pid) != process:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def end_all(orphans: Callable[[], list[int]], deadline_s: float) -> None:
    """SIGKILL to all children that `orphans` names, again and again, until there are none or the time is up: those
    below one that is ended become our children next."""
    while (ours := orphans()) and time.monotonic() < deadline_s:
        for pid in ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # our child: its number is nobody else's until we wait for it
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0 if state(pid) == "Z" else os.WNOHANG)


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def _descendants(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        below = children(left.pop())
        found += below
        left += below
    return found


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _seen(pid: int) -> Seen | None:
    """None: it is gone, or a zombie."""
    fields = _stat(pid)
    return Seen(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def started(pid: int) -> int:
    """Clock ticks since boot, of a zombie too; 0: it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def session(pid: int) -> int:
    """0: it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def state(pid: int) -> str:
    """The kernel's letter for it; '': it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _marked(pid: int) -> int:
    """The worker's process id in the environment that a process was executed with; 0 where there is none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = [line for line in file.read().split(b"\0") if line.startswith(MARK)]
    except OSError:
        return 0
    value = found[0].removeprefix(MARK) if found else b""
    return int(value) if value.isdigit() else 0
