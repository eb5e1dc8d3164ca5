"""Every process that a test starts is ended, by its id, on failure too; also those that detached themselves.

All children carry a tag in their environment, which their own children inherit: so a daemon's detached agent and
its workers are found again through /proc, wherever they hang in the process tree.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from .warm import Process, forge

Started = subprocess.Popen[Any] | Process
TAG = "ELASTIC_TEST_TAG"


def tagged(tag: str, name: str = TAG) -> list[int]:
    """Ids of the living processes whose environment has `name`=`tag`. Zombies have no environment: not among them."""
    want = f"{name}={tag}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if want in pathlib.Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return found


def describe(pids: Iterable[int]) -> str:
    """One line per process, for a failure's message."""
    lines = []
    for pid in pids:
        try:
            argv = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            lines.append(f"{pid} ({state(pid)}): {argv.strip()[:200]}")
        except OSError:
            continue
    return "\n".join(lines)


def state(pid: int | str) -> str:
    """The kernel's letter for it, or for a thread ("PID/task/TID"): R, S, D, T, Z, …; "" when it is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; False when the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def stop(pid: int) -> None:
    """SIGSTOP, and wait until each thread has stopped: on a busy machine others run on until the first one obeys."""
    assert kill(pid, signal.SIGSTOP), f"{pid} is gone"
    end_s = time.monotonic() + 30.0
    while not all(state(f"{pid}/task/{thread}") == "T" for thread in os.listdir(f"/proc/{pid}/task")):
        assert time.monotonic() < end_s, f"{pid} does not stop"
        time.sleep(0.002)


def end_all(pids: Iterable[int], deadline_s: float = 5.0) -> None:
    """SIGKILL these and wait until they are gone. Raises AssertionError when one is not."""
    left = [pid for pid in pids if kill(pid)]
    end_s = time.monotonic() + deadline_s
    while left := [pid for pid in left if alive(pid)]:
        assert time.monotonic() < end_s, f"still there after SIGKILL:\n{describe(left)}"
        time.sleep(0.01)


class Procs:
    """Starts processes and ends them all, with everything they started, when the `with` block is left."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self._started: list[Started] = []

    def __enter__(self) -> Procs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment plus the tag and `extra`."""
        return {**os.environ, TAG: self.tag, **(extra or {})}

    def popen(
        self, argv: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `argv` in a session of its own; `env` is added to the environment. `options` go to Popen."""
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(list(argv), env=self.env(env), start_new_session=True, **options)
        self._started.append(process)
        return process

    def python(
        self,
        argv: Sequence[str],
        *,
        output: IO[bytes],
        warm: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
    ) -> Started:
        """Start `python ARGV`, all that it says to `output`; `warm`: forked, see support/warm.py."""
        if not warm:
            return self.popen([sys.executable, *argv], env=env, stdout=output, stderr=output)
        process = forge().popen(argv, env=self.env(env), output=output, cwd=cwd)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """Living processes that we started, and their descendants."""
        return tagged(self.tag)

    def end(self, process: Started, grace_s: float = 0.0) -> int:
        """End one process that `popen` returned: SIGTERM first when there is a grace. Returns its exit code."""
        if grace_s and process.poll() is None:
            process.terminate()
            try:
                return process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        if process.poll() is None:
            process.kill()
        return process.wait(30)

    def close(self) -> None:
        """Kill what is left. New ones may be born while we kill, so look until none is found."""
        for _ in range(50):
            if not (left := self.pids()):
                break
            end_all(left)
        for process in self._started:
            if process.poll() is None:  # it cleared its own environment
                process.kill()
            process.wait(30)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()
        left = self.pids()
        assert not left, f"processes keep coming back:\n{describe(left)}"
