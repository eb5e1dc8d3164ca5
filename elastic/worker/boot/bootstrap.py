"""Turns a fresh fork of the zygote into a worker that runs the user's script as ``__main__``."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import os
import runpy
import signal
import stat
import sys
import time
import traceback
import types
from collections.abc import Sequence
from errno import ENOEXEC
from pathlib import Path
from typing import NoReturn

import torch

from elastic.contract.worker import messages
from elastic.contract.worker.worker_config import WorkerConfig
from elastic.util.capped_log import output_stream
from elastic.util.processes import die_with
from elastic.worker.link import misuse
from elastic.worker.link.session import CHANNEL_ENV, PAGE_ENV, WORKER_ENV

from . import random_state
from .kept_imports import install
from .title import title, worker_title

ADOPTION_S = 5.0
MOST_S = 1e6
STACKS_AT = 0.9
"""The stacks of a process that does not exit are written to its log after this fraction of its time limit."""
_OURS = (str(Path(__file__).parents[2]) + os.sep, runpy.__file__, "<frozen runpy>")
_INNER = (*_OURS, str(Path(torch.__file__).parent) + os.sep)


def become(order: messages.Fork, descriptors: list[int], agent_pid: int) -> NoReturn:
    """Turn this process into the worker that `order` describes. `descriptors`: channel, beat page, log.

    Ends by SystemExit, which must reach the interpreter: threads, atexit handlers and open files then end as in any
    Python program, and the agent kills a process that exceeds its time limit.
    """
    _take_place(order, descriptors, agent_pid)
    code = _run(order.argv)
    _say_ended(descriptors[0], code, WorkerConfig.read(order.env))
    sys.exit(code)


def _say_ended(channel: int, code: int, config: WorkerConfig) -> None:
    """Report the exit to the agent, which starts its time limit, and schedule a stack dump shortly before that
    expires."""
    _flush()
    limit_s = min(config.exit_timeout_s, config.stop_grace_s) if code else config.exit_timeout_s
    if 0 < limit_s < MOST_S:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback_later(limit_s * STACKS_AT, file=2)
    with contextlib.suppress(OSError):  # closed by the script; or the agent is gone, which ends this process
        if stat.S_ISSOCK(os.fstat(channel).st_mode):
            ended = messages.ScriptEnded(code=code, misuse=misuse.ends_run, terminated=terminated())
            os.write(channel, messages.encode(ended))


def _flush() -> None:
    """Flush stdout and stderr, unless the script has closed or replaced them: the exit code remains the script's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _take_place(order: messages.Fork, descriptors: list[int], agent_pid: int) -> None:
    os.setsid()  # its own process group: killing that also kills its children (data loaders)
    channel, page, log = descriptors
    for descriptor in (channel, page):  # kept by a script, or a program, that goes on by exec: it is the same process
        os.set_inheritable(descriptor, True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    deadline_s = time.monotonic() + ADOPTION_S
    while os.getppid() != agent_pid and time.monotonic() < deadline_s:
        os.sched_yield()  # the intermediate process exits within microseconds
    if not die_with(agent_pid):
        os._exit(1)  # the agent is gone
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new interpreter
    watch_signals()
    os.environ.clear()
    os.environ.update(order.env)
    os.environ[CHANNEL_ENV], os.environ[PAGE_ENV] = str(channel), str(page)
    os.environ[WORKER_ENV] = str(os.getpid())
    title(worker_title(os.environ, order.argv))
    random_state.renew()
    os.chdir(order.workdir)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = output_stream(1)
    # As the interpreter's own: unencodable characters are written escaped.
    sys.stderr = output_stream(2, errors="backslashreplace")
    atexit.register(_flush)  # the first handlers of the worker, so the last to run
    unfreeze_at_exit()
    gc.enable()


def unfreeze_at_exit() -> None:
    """Have the interpreter end what the zygote froze, if triton is in it. Triton's bindings (nanobind) log each object
    that outlives the interpreter as leaked, some dozen lines. It costs about a second: not without a reason."""
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def _run(argv: tuple[str, ...]) -> int:
    """Run the script as ``python SCRIPT`` or ``python -m MODULE`` would; a program replaces this process. Returns the
    exit code."""
    if argv[0] == messages.PROGRAM:
        return become_program(argv[1:])
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from elastic.worker.torch_internals import torch_private  # noqa: F401 - with it a DistributedDataParallel may outlive its group

    handler = get_error_handler()
    handler.initialize()
    try:
        run_as_main(argv)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - as the interpreter itself does at the top: report and exit 1
        misuse.note(error)
        try:
            print("".join(_of_the_script(error).format()), end="", file=sys.stderr)
        finally:  # printing fails if the log is on a full disk
            handler.record_exception(error)
        return 1
    return 0


def _of_the_script(error: BaseException) -> traceback.TracebackException:
    """`error` as the interpreter prints it, without the frames of elastic and of torch between the script's own and the
    innermost one. The error file, and so ``elasticctl incidents --full``, has all of them."""
    report = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    part: traceback.TracebackException | None = report
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        own = [frame for frame in part.stack if not frame.filename.startswith(_INNER)]
        if own and not part.stack[-1].filename.startswith(_OURS):
            own += part.stack[-1:] if part.stack[-1] is not own[-1] else []
        if own or isinstance(error, SyntaxError):
            part.stack[:] = own
        part = part.__cause__ or part.__context__
    return report


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


_PIPE_BYTES = 65536
_ends: tuple[int, int] | None = None
"""Of the pipe: read, write."""


def watch_signals() -> None:
    """Have Python write the number of each signal that the script handles to a pipe. A script that sets another wakeup
    descriptor, as asyncio's signal handlers do, is not watched from then on."""
    global _ends
    _ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(_ends[1], warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_unwatch)


def _unwatch() -> None:
    """In a process that the script forks, a pool's for example: what that gets is not for this worker."""
    if (before := signal.set_wakeup_fd(-1)) >= 0 and _ends is not None and before != _ends[1]:
        signal.set_wakeup_fd(before)  # the script's own


def terminated() -> bool:
    """Whether a SIGTERM has been handled since `watch_signals`, as far as that can be known."""
    with contextlib.suppress(OSError):  # nothing to read, or closed by the script
        return _ends is not None and signal.SIGTERM in os.read(_ends[0], _PIPE_BYTES)
    return False


def run_as_main(argv: Sequence[str]) -> None:
    """As ``python ARGV``, with the code that the job began with; raises what the script raises. Its module remains
    `__main__`, for its threads and handlers and for objects pickled by that name."""
    finder = install()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if "multiprocessing.process" in sys.modules:  # spawned children resolve a relative script path against it
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # what the interpreter calls for -m
        return
    path = os.path.abspath(argv[0])
    sys.argv = list(argv)
    there = os.path.isfile(path) or finder.code.find(path) is not None
    if not there or path.endswith((".zip", ".pyz", ".pyc")):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(path))
    loader = finder.loader("__main__", path)
    loader.announce()
    module.__dict__.update(__file__=path, __cached__=None, __spec__=None, __loader__=loader)
    exec(loader.compiled(), module.__dict__)


NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a program that cannot be run, as those of a shell."""


def become_program(command: Sequence[str]) -> int:
    """Replace this process by `command`, found by PATH if its first word has no slash. Returns an exit code, with the
    reason on stderr, if that fails.

    The channel and the beat page stay open: a shell script that ends with ``exec python train.py`` has the same process
    id, and elastic.run in it is managed as in any worker.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), os.environ)
    except OSError as error:
        hint = "; a script needs an interpreter in its first line, such as #!/bin/sh" if error.errno == ENOEXEC else ""
        print(f"elastic: {command[0]}: {error.strerror}{hint}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
