"""Agents and scripts that are forked from a process with all imports done (support/forge.py): `forge().popen(…)`."""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from . import scratch
from .forge import EARLY

SOCKET_ENV = "ELASTIC_TEST_FORGE"
ROOM = 16_000
"""Bytes for the environment of a fork, where /proc shows it."""
TITLE = 400
"""Bytes for its title."""
START_S = 60.0


class Process:
    """As much of a Popen as tests and daemons use."""

    stdin = stdout = stderr = None

    def __init__(self, args: Sequence[str], pid: int, connection: socket.socket) -> None:
        self.args, self.pid = list(args), pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        return self._seen(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._seen(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _seen(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            raw = self._connection.recv(4096)
            self.returncode = int(json.loads(raw)["code"]) if raw else -signal.SIGKILL  # it dies with the forge
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the forge has not told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def ask(
    path: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, descriptors: Sequence[int], *, adopt: bool = False
) -> tuple[int, socket.socket] | None:
    """Have the forge that listens at `path` fork `python ARGV`, with /dev/null and these as its descriptors 0, 1, …
    Returns its id and the socket that tells its end; None where a fork would not do. `adopt`: it becomes a child of
    this process, a subreaper above the forge."""
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(START_S)  # it may still be importing
        connection.connect(path)
        null = undo.enter_context(open(os.devnull, "rb"))
        order = json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd, "adopt": adopt}).encode()
        rights = array.array("i", [null.fileno(), *descriptors])
        connection.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        answer = json.loads(connection.recv(4096))
        if "pid" not in answer:
            return None
        return answer["pid"], connection.dup()


def start(
    path: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, output: IO[bytes], errors: IO[bytes] | None = None
) -> Process | subprocess.Popen[bytes]:
    """Start `python ARGV` in a session of its own, by the forge that listens at `path`; as a new process where a fork
    would not do. Raises OSError."""
    if forked := ask(path, argv, env, cwd, [output.fileno(), (errors or output).fileno()]):
        return Process(argv, *forked)
    return subprocess.Popen(
        [sys.executable, *argv],
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors or output,
        start_new_session=True,
    )


class Forge:
    """`path`: the socket of one that runs; '' to start one."""

    def __init__(self, path: str = "") -> None:
        self._started_by = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self.path = path or self._start()
        self.ready = False

    def _start(self) -> str:
        self._folder = scratch.folder("forge")
        path = f"{self._folder}/socket"
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                 "GRPC_ENABLE_FORK_SUPPORT": "0", "RES_OPTIONS": "timeout:1 attempts:1"}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("forge.py")), path, "." * TITLE],
            env={**_environment(), **quiet, "SPT_NOENV": "1", "ELASTIC_TEST_FORGE_ROOM": "." * ROOM},
            stdin=subprocess.PIPE,
            process_group=0,
        )
        end_s = time.monotonic() + START_S
        while not os.path.exists(path):
            assert self.lives(), f"the forge ended with {self._process.returncode}"
            assert time.monotonic() < end_s, "the forge does not listen"
            time.sleep(0.01)
        return path

    @property
    def ours(self) -> bool:
        """Whether this process has started it, and so is above all that it forks."""
        return self._process is not None

    def lives(self) -> bool:
        return self._process is None or self._process.poll() is None

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes] | None = None,
        cwd: str | os.PathLike[str] = ".",
    ) -> Process | subprocess.Popen[bytes]:
        return start(self.path, argv, env, os.path.abspath(cwd), output, errors)

    def close(self) -> None:
        if self._process is None or os.getpid() != self._started_by:
            return
        self._process.kill()  # it may still be importing; all that it has forked dies with it
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


_forge: Forge | None = None
_early: dict[str, str] | None = None


def remember_environment() -> None:
    """The variables that act at the start of a process are the forge's as they are now, before any test: the first
    test that wants the forge may have set some, such as a PYTHONPATH with stand-ins, for itself alone."""
    global _early
    _early = {name: value for name, value in os.environ.items() if name.startswith(EARLY)}


def _environment() -> dict[str, str]:
    if _early is None:
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if not name.startswith(EARLY)} | _early


def forge() -> Forge:
    """The one of this test run, which is started by the first test that wants it; a run that a test starts uses that
    test's."""
    global _forge
    if _forge is None or not _forge.lives():
        if _forge is not None:
            _forge.close()
        _forge = Forge(os.environ.get(SOCKET_ENV, ""))
        atexit.register(end)  # where it is not a test run that uses it
    return _forge


def ready() -> str:
    """The socket of a forge that has imported what it is to: a daemon that asks it earlier would wait in its loop."""
    found = forge()
    if not found.ready:
        run(["-c", ""])
        found.ready = True
    return found.path


def end() -> None:
    """End it, and all that it has forked."""
    global _forge
    ours, _forge = _forge, None
    if ours is not None:
        ours.close()


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ".",
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run(…, text=True, capture_output=True, check=False) of `python ARGV`, where ARGV is a script or -c
    with its arguments."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = forge().popen(argv, env=os.environ if env is None else env, output=output, errors=errors, cwd=cwd)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(argv, code, *said)
