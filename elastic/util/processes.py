"""Other processes as the kernel shows them: their state, waiting for their end, signals that cannot hit a stranger."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
from collections.abc import Callable

from .files import closed_after

PR_SET_PDEATHSIG = 1
_REAL_TIME = "SIGRTMIN"
_READ_BYTES = 65536
_EXITING, _SIGNALED = 0x4, 0x400
"""PF_EXITING and PF_SIGNALED (set before a core is dumped), in the flags of /proc/PID/stat: see proc(5) and Linux's
include/linux/sched.h."""
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def die_with(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends. Returns False if `parent` is not its parent any more."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty: there is no such process."""
    try:
        return kernel_file(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_ending(pid: int) -> bool:
    """Whether the process has ended, or will without running any more of its code: it exits, dumps its core or has been
    killed, and the kernel has yet to free its memory. With gigabytes, on a busy machine, that takes seconds. False
    where that cannot be read, for lack of descriptors for example."""
    try:
        fields = kernel_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X") or int(fields[6]) & (_EXITING | _SIGNALED):
            return True
        rows = dict(row.partition(b":")[::2] for row in kernel_file(f"/proc/{pid}/status").split(b"\n"))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, LookupError, ValueError):
        return False
    return any(int(rows.get(name, b"0"), 16) >> (signal.SIGKILL - 1) & 1 for name in (b"SigPnd", b"ShdPnd"))


def memory_nbytes(pid: int) -> tuple[int, int]:
    """(resident memory of a process, how much of that it shares with a file or another process), in bytes; (0, 0) of a
    zombie. Raises OSError."""
    resident, shared = map(int, kernel_file(f"/proc/{pid}/statm").split()[1:3])
    return resident * _PAGE_BYTES, shared * _PAGE_BYTES


def kernel_file(path: str) -> bytes:
    """The content of a file in /proc. An agent reads dozens a second, and the layers of Python's `open` cost more than
    the kernel does. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, _READ_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def has_ended(pidfd: int, wait_s: float | None = None) -> bool:
    """Whether the process has ended, at the latest after `wait_s` seconds; None: wait until it has."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if wait_s is None else max(0.0, wait_s) * 1000))


def wait_until_gone(pid: int, look_every_s: float | None = None, stop: Callable[[], bool] = lambda: False) -> None:
    """Return when the process has ended; or, asked every `look_every_s` seconds, when `stop` says so."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with closed_after(pidfd):
        while not has_ended(pidfd, look_every_s) and not stop():
            pass


def unlinks_shared_memory(pid: int) -> bool:
    """Whether the process only waits for others to end, and then removes their files in /dev/shm and ends itself:
    torch's manager of the sharing strategy file_system, or Python's resource tracker. Killed, it leaves them there."""
    try:
        command = kernel_file(f"/proc/{pid}/cmdline")
    except OSError:
        return False
    return b"multiprocessing.resource_tracker" in command or command.split(b"\0")[0].endswith(b"torch_shm_manager")


def kill_if(pid: int, is_the_one: Callable[[], bool]) -> bool:
    """Send SIGKILL to the process if, with its number held, it is still the one that was meant. Whether it was sent."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_the_one():
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def signal_name(number: int) -> str:
    """'SIGKILL', 'SIGRTMIN+6'. Python names only two of the real-time signals, and raises for the others."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"{_REAL_TIME}{number - signal.SIGRTMIN:+d}"


def signal_number(name: str) -> int:
    """The number of a signal named by `signal_name`."""
    if name.startswith((f"{_REAL_TIME}+", f"{_REAL_TIME}-")):
        return signal.SIGRTMIN + int(name.removeprefix(_REAL_TIME))
    return int(signal.Signals[name])


_OF_THE_NODE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)


def is_shortage(error: BaseException) -> bool:
    """Where a worker cannot be started for it, another node may be able to, and this one later: the job's script is not
    at fault."""
    return isinstance(error, OSError) and error.errno in _OF_THE_NODE
