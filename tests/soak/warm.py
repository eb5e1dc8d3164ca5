"""A zygote for an agent that is forked and not started: torch is imported already, which saves seconds of a core."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import time
import types
from collections.abc import Sequence
from typing import Any

import elastic.agent.zygote
import elastic.worker.boot.zygote

MODULE = "elastic.worker.boot.zygote"
MESSAGE_BYTES = 1 << 20


def offer() -> None:
    """To be called in an agent's process before it does anything: its first zygote is forked here, and waits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        _wait(theirs)
    theirs.close()
    waiting: list[Forked] = [Forked(pid, ours)]

    def popen(argv: Sequence[str], **options: Any) -> Any:
        if waiting and MODULE in argv:
            return waiting.pop().take_place(list(argv), **options)
        return subprocess.Popen(argv, **options)

    names = {**vars(subprocess), "Popen": popen}
    elastic.agent.zygote.subprocess = types.SimpleNamespace(**names)  # type: ignore[attr-defined]


def _wait(control: socket.socket) -> None:
    """In the fork: become the zygote that is asked for, or end with the agent."""
    code = 1
    try:
        raw, ancillary, _, _ = control.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(3 * 4))
        if raw:
            order = json.loads(raw)
            descriptors = array.array("i", ancillary[0][2])
            channel, output, null = descriptors
            os.setsid()
            for number, to in ((null, 0), (output, 1), (output, 2)):
                os.dup2(number, to)
            os.environ.clear()
            os.environ.update(order["env"])
            code = elastic.worker.boot.zygote.main([str(channel), *order["args"]])
    finally:
        os._exit(code)


class Forked:
    """As much of a Popen as the agent uses."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._control = control

    def take_place(
        self, argv: list[str], *, env: dict[str, str], stdout: Any, pass_fds: Sequence[int], **_: Any
    ) -> Forked:
        args = argv[argv.index(MODULE) + 2 :]  # without the socket's number, which is another one there
        null = os.open(os.devnull, os.O_RDONLY)
        rights = array.array("i", [*pass_fds, stdout.fileno(), null])
        message = json.dumps({"args": args, "env": env}).encode()
        self._control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._control.close()
        os.close(null)
        return self

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (60.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(MODULE, timeout or 60.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
