"""The children of this process as the kernel shows them: sending signals, exit status, waiting.

The kernel closes the files of a process in the order of their descriptors, and signals its end after the last: with a
large context on a GPU that is some tenths of a second later than the end of file on its channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

import structlog

from elastic.util.processes import has_ended

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
