"""The children of this process as the kernel shows them: signalled, ending, ended.

The files of a process are closed in the order of their descriptors, and its end is told after the last: with a large
context on a GPU that is some tenths of a second later than the end of file on its channel.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

import structlog

PF_EXITING = 0x4
"""The kernel's flag (linux/sched.h) of a thread that does not run in user space any more."""
_FLAGS, _EXIT_CODE = 6, 49
"""Fields of /proc/PID/stat, counted from the state."""

log = structlog.get_logger()


def exit_status(pid: int) -> int | None:
    """The status that waiting for `pid` will give, once all its threads are ending; None: it lives, is no more, or the
    status is not to be read."""
    status = None
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            if not int(fields[_FLAGS]) & PF_EXITING:
                return None
            if int(task.name) == pid:
                status = int(fields[_EXIT_CODE])
        # A process that may not be read shows 0.
        readable = bool(status) or os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return None
    return status if readable else None


def ended(pidfd: int, deadline_s: float) -> bool:
    """Wait for a child's end, and take its exit status."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    return True


def dead_in_session(pid: int) -> int | None:
    """The session of a zombie; None: it lives, or is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _parent, _group, session = file.read().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(session) if state == "Z" else None


def signal_group(pid: int, number: int) -> None:
    """Signal the process group that `pid` leads."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Not (yet) the leader of its group: killed between its fork and its setsid.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    except PermissionError:
        log.warning("worker.cannot_be_signalled", pid=pid)


def children() -> list[int]:
    """Process ids of the children of this process."""
    pid = os.getpid()
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/children") as children:
            found += map(int, children.read().split())
    return found
