"""A process with torch and the agent imported, that forks agents and plain ranks: it saves each case some seconds.

    python -m soak.forge

Reads one JSON object a line: {"agent": FOLDER, "out": FILE, "env": {…}} runs an agent, {"script": PATH, …} a script.
Answers {"pid": …} to each, in order, and {"over": pid, "code": …} when one has ended. It ends when its input does. It
never uses gRPC itself: a process that has must not fork.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from typing import Any

import torch

import elastic.agent.__main__ as agent

from . import warm

PR_SET_PDEATHSIG = 1
WARM = ("torch._dynamo", "torch.nn.parallel", "torch.utils.data", "elastic.agent.torch_agent", "elastic.worker.run")


def main() -> int:
    torch.set_num_threads(1)
    for name in WARM:
        importlib.import_module(name)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    while True:
        readable, _, _ = select.select([0, reader], [], [])
        if reader in readable:
            os.read(reader, 4096)
            _reap()
        if 0 in readable:
            if not (chunk := os.read(0, 65536)):
                return 0
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                _tell({"pid": _fork(json.loads(line))})


def _tell(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell({"over": pid, "code": os.waitstatus_to_exitcode(status)})


def _fork(order: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a run that is killed leaves nobody behind
        os.setsid()
        null, out = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        )
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.closerange(3, 256)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process lives
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(order["env"])
        if "agent" in order:
            warm.offer()
            code = agent.main([order["agent"]])
        else:
            sys.argv = [order["script"]]
            sys.path.insert(0, os.path.dirname(order["script"]))
            runpy.run_path(order["script"], run_name="__main__")
            code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does at the top: report and end with 1
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
