"""The parent of an agent that is no systemd unit: it ends what the agent leaves, in whatever session and environment.

    python -I -S guard.py FD

FD is a socket, from which it reads the agent's environment mark and command, separated by zero bytes. It runs the
command as its child, and writes the child's process id and, at its end, its wait status. As a child subreaper it is
then the parent of all that the agent has left: it kills its children until there are none. The mark is in the agent's
environment, not in its own: a daemon kills what has it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
SWEEP_S = 10.0
"""A process that is stuck in the kernel is not waited for longer."""
UNLINK_S = 4.0
"""For how long processes are spared that unlink the shared memory of others: see `util.processes`."""


def main(channel: socket.socket) -> None:
    mark, *command = _received(channel).split(b"\0")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    agent = os.fork()
    if agent == 0:
        _become(channel, mark, command)
    channel.sendall(b"%d\n" % agent)
    while (ended := os.wait())[0] != agent:
        pass
    try:
        channel.sendall(b"%d\n" % ended[1])
    except OSError:
        pass  # the daemon has ended, and the next one finds out by the agent's lock
    _end_children(time.monotonic() + SWEEP_S)


def _received(channel: socket.socket) -> bytes:
    parts = []
    while part := channel.recv(65536):
        parts.append(part)
    return b"".join(parts)


def _become(channel: socket.socket, mark: bytes, command: list[bytes]) -> None:
    """Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        name, _, value = mark.partition(b"=")
        os.environb[name] = value
        os.execve(command[0], command, os.environb)
    except OSError as error:
        channel.sendall(b"E%d\n" % (error.errno or 0))
    finally:
        os._exit(127)


def _end_children(deadline_s: float) -> None:
    """Children of a killed process become ours next."""
    spare_s = time.monotonic() + UNLINK_S
    while (now_s := time.monotonic()) < deadline_s:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            for pid in map(int, listing.read().split()):
                try:
                    if now_s >= spare_s or not _unlinks_shared_memory(pid):
                        os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass  # it has ended; or has changed its user, and so left the job
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _unlinks_shared_memory(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read(65536)
    return b"multiprocessing.resource_tracker" in command or command.split(b"\0")[0].endswith(b"torch_shm_manager")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
