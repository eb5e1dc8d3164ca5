"""Which processes belong to which worker: its descendants, and those that have left its session or lost their parent.

The agent is the child subreaper of its workers: a process whose parent dies becomes the agent's child. So a process
that a worker leaves behind is found among the agent's children, in whatever session. It belongs to the worker whose
session it is in, whose mark is in its environment, or below which it was seen. A process that belongs to a living
worker, such as a service detached by the script, is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec
import structlog

from elastic.util.processes import has_ended, kernel_file, kill_if, stat_fields, unlinks_shared_memory

PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4
"""The kernel's flag (linux/sched.h) of a thread that no longer runs in user space."""
_FLAGS, _EXIT_CODE = 6, 49
"""Fields of /proc/PID/stat, counted from the state."""

log = structlog.get_logger()


def become_subreaper() -> None:
    """Make descendants that lose their parent children of this process. Raises OSError."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("cannot become a child subreaper: workers could not be waited for")


def exit_status(pid: int) -> int | None:
    """The status that waiting for `pid` will return, once all its threads are exiting; None: it lives, is gone, or the
    status cannot be read."""
    status = None
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            if not int(fields[_FLAGS]) & PF_EXITING:
                return None
            if int(task.name) == pid:
                status = int(fields[_EXIT_CODE])
        # The field is 0 for a process that this one may not inspect.
        readable = bool(status) or os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return None
    return status if readable else None


def ended(pidfd: int, deadline_s: float) -> bool:
    """Wait for a child to exit, and reap it. Returns False if it has not by `deadline_s`."""
    if not has_ended(pidfd, deadline_s - time.monotonic()):
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    return True


def signal_group(pid: int, number: int) -> None:
    """Signal the process group that `pid` leads."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # not (yet) the leader of its group: killed between its fork and its setsid
        signal_process(pid, number)
    except PermissionError:
        log.warning("worker.cannot_be_signalled", pid=pid)


def signal_process(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # its end is about to be seen
    except PermissionError:
        log.warning("worker.cannot_be_signalled", pid=pid)


MARK = b"ELASTIC_WORKER_PID="
"""`worker.session.WORKER_ENV`: inherited by programs that a worker executes."""


UNLINK_S = 4.0
"""How long a process that unlinks the shared memory of a dead worker is spared. torch's does it 2 s after its last
client has ended."""


EMPTY_LOOKS = 3
"""/proc may leave out a child while others end."""


class SeenProcess(msgspec.Struct, frozen=True):
    """One process. The pid alone may be reused later."""

    pid: int
    started: int
    """Clock ticks since boot."""


class Descendants:
    """Records the descendants of workers, and finds the processes that dead workers have left behind."""

    def __init__(self) -> None:
        self._of: dict[SeenProcess, int] = {}
        """Descendant -> pid of its worker."""
        self._workers: set[int] = set()
        """Pids of all workers so far."""
        self._spared: dict[SeenProcess, float] = {}
        """Orphan that unlinks shared memory -> when it was first seen as one."""

    def look(self, workers: Collection[int]) -> None:
        """Record the descendants of `workers` (pids); to be called every few seconds."""
        self._workers.update(workers)
        seen = {process: worker for process, worker in self._of.items() if _seen(process.pid) == process}
        for worker in workers:
            for pid in _descendants(worker):
                if (process := _seen(pid)) is not None:
                    seen[process] = worker
        self._of = seen

    def orphans(self, ours: Iterable[int], living: Collection[int]) -> list[SeenProcess]:
        """Processes in `ours`, children that the agent did not start, that belong to no worker in `living`; those that
        unlink shared memory once they have had UNLINK_S for it."""
        self._workers.update(living)
        found = [process for pid in ours if (process := _seen(pid)) and not self._belongs(process, living)]
        now_s = time.monotonic()
        self._spared = {p: self._spared.get(p, now_s) for p in found if unlinks_shared_memory(p.pid)}
        return [process for process in found if now_s - self._spared.get(process, -UNLINK_S) >= UNLINK_S]

    def _belongs(self, process: SeenProcess, living: Collection[int]) -> bool:
        # The session last: one created by a service may have the number that a dead worker had.
        for worker in (self._of.get(process), _marked(process.pid), session(process.pid)):
            if worker in self._workers:
                return worker in living
        # It left its worker's session between two looks, without the mark: its worker may be a living one.
        return bool(living)


def end(process: SeenProcess) -> bool:
    """Send SIGKILL to this very process, not to another that has reused its pid. Returns whether it was sent."""
    return kill_if(process.pid, lambda: _seen(process.pid) == process)


def end_all(orphans: Callable[[], list[int]], deadline_s: float) -> None:
    """Send SIGKILL to all children that `orphans` returns, repeatedly, until there are none or the time is up: children
    of a killed process become children of the agent next. Those that unlink shared memory have UNLINK_S to do that."""
    spare_s, empty = time.monotonic() + UNLINK_S, 0
    while empty < EMPTY_LOOKS and (now_s := time.monotonic()) < deadline_s:
        empty = 0 if (ours := orphans()) else empty + 1
        for pid in ours:
            if now_s >= spare_s or not unlinks_shared_memory(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)  # a child: its pid is not reused before it is reaped
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0 if state(pid) == "Z" else os.WNOHANG)
        threading.Event().wait(0.002)


def end_group(leader: int) -> None:
    """Send SIGKILL to the process group of a worker, which is ending or killed with it, except to processes that unlink
    its shared memory."""
    if not any(
        unlinks_shared_memory(pid) for pid in (*children(leader), *children(os.getpid())) if group(pid) == leader
    ):
        signal_group(leader, signal.SIGKILL)
        return
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if group(pid) == leader and not unlinks_shared_memory(pid):
            kill_if(pid, lambda pid=pid: group(pid) == leader)  # type: ignore[misc]


def children(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                pids += map(int, kernel_file(f"/proc/{pid}/task/{task}/children").split())
    return pids


def _descendants(pid: int) -> list[int]:
    pids, left = [], [pid]
    while left:
        below = children(left.pop())
        pids += below
        left += below
    return pids


def _seen(pid: int) -> SeenProcess | None:
    """None: the process is gone, or a zombie."""
    fields = stat_fields(pid)
    return SeenProcess(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def _stat_number(pid: int, field: int) -> int:
    """A field of /proc/PID/stat, counted from the state; 0: the process is gone."""
    fields = stat_fields(pid)
    return int(fields[field]) if fields else 0


def started(pid: int) -> int:
    """Clock ticks since boot, of a zombie too; 0: it is gone."""
    return _stat_number(pid, 19)


def group(pid: int) -> int:
    return _stat_number(pid, 2)


def session(pid: int) -> int:
    return _stat_number(pid, 3)


def state(pid: int) -> str:
    """The kernel's letter for its state; X: there is no such process."""
    fields = stat_fields(pid)
    return fields[0] if fields else "X"


def _marked(pid: int) -> int:
    """The worker pid in the environment that a process was executed with; 0: there is none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = [line for line in file.read().split(b"\0") if line.startswith(MARK)]
    except OSError:
        return 0
    value = found[0].removeprefix(MARK) if found else b""
    return int(value) if value.isdigit() else 0
