"""A zygote for an agent that is forked and not started: torch is imported already, which saves seconds of a core."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import elastic.agent.workers.zygote
import elastic.worker.boot.zygote

from . import warm
from .forge import MESSAGE_BYTES, differs, take_environment, take_streams

if TYPE_CHECKING:  # the forge, and so all that it forks, must not import it
    import pytest

MODULE = "elastic.worker.boot.zygote"


class Waiting:
    """In the fork: to become the zygote that the agent asks for, or to end with the agent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def run(self) -> int:
        raw, ancillary, _, _ = self._control.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4))
        if not raw:
            return 0
        order = json.loads(raw)
        self._control.detach()
        os.setsid()
        take_streams(array.array("i", ancillary[0][2]))
        take_environment(order["env"])
        return elastic.worker.boot.zygote.main(["3", *order["args"]])


def offer() -> Waiting | None:
    """To be called in an agent's process before it does anything: its first zygote is forked here, and waits. What is
    returned in the fork is to be run there; None in the agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        return Waiting(theirs)
    theirs.close()
    waiting: list[Forked] = [Forked(pid, ours)]

    def popen(argv: Sequence[str], **options: Any) -> Any:
        fits = waiting and MODULE in argv and argv[0] == sys.executable and not differs(options["env"], os.environ)
        return waiting.pop().take_place(list(argv), **options) if fits else subprocess.Popen(argv, **options)

    names = {**vars(subprocess), "Popen": popen}
    elastic.agent.workers.zygote.subprocess = types.SimpleNamespace(**names)  # type: ignore[attr-defined]
    return None


def adopt_zygotes(patch: pytest.MonkeyPatch) -> None:
    """For a pool in the test's own process: the forge forks its zygotes, which become children of this process."""
    if not warm.forge().ours:
        return
    path = warm.forge().path

    def popen(argv: Sequence[str], **options: Any) -> Any:
        if MODULE not in argv or argv[0] != sys.executable:
            return subprocess.Popen(argv, **options)
        streams = [options["stdout"].fileno(), options["stdout"].fileno(), *options["pass_fds"]]
        forked = warm.ask(path, argv[1:], options["env"], os.getcwd(), streams, adopt=True)
        if forked is None:
            return subprocess.Popen(argv, **options)
        pid, connection = forked
        connection.close()
        return Forked(pid, connection)

    patch.setattr(
        elastic.agent.workers.zygote, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    )


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
        rights = array.array("i", [null, stdout.fileno(), stdout.fileno(), *pass_fds])
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
