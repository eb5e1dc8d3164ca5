"""From a fresh fork of the zygote to the user's script running as ``__main__``."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import runpy
import signal
import sys
import time
import traceback
from typing import NoReturn

from ..core import messages
from .session import CHANNEL_ENV, PAGE_ENV

PR_SET_PDEATHSIG = 1
ADOPTION_S = 5.0


def become(order: messages.Fork, descriptors: list[int], agent_pid: int) -> NoReturn:
    """Turn this process into the worker that `order` describes. `descriptors`: channel, beat page, log."""
    code = 1
    try:
        _take_place(order, descriptors, agent_pid)
        code = _run(order.argv)
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The disk is full, or the script has closed the stream or put another thing in its place.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def _take_place(order: messages.Fork, descriptors: list[int], agent_pid: int) -> None:
    os.setsid()  # its own group: killing that takes its children (data loaders) along
    channel, page, log = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    deadline_s = time.monotonic() + ADOPTION_S
    while os.getppid() != agent_pid and time.monotonic() < deadline_s:
        os.sched_yield()  # the one between us and the agent ends within microseconds
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(1)  # the agent is gone
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order.env)
    os.environ[CHANNEL_ENV], os.environ[PAGE_ENV] = str(channel), str(page)
    os.chdir(order.workdir)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    # As the interpreter's own: what is no text is told all the same.
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    gc.enable()


def _run(argv: tuple[str, ...]) -> int:
    """Run the script as ``python SCRIPT`` or ``python -m MODULE`` would. Returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - as the interpreter itself does at the top: report and exit 1
        try:
            traceback.print_exc()
        finally:  # a log on a full disk takes no line
            handler.record_exception(error)
        return 1
    return 0


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
