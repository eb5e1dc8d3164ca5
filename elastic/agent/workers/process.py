"""A worker's process as the pool keeps it, the pool's events, and whether the kernel's OOM killer has struck."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence

import msgspec

from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.worker import messages
from elastic.contract.worker.beat import BeatPage
from elastic.contract.worker.messages import Fork, FromWorker
from elastic.util.processes import kernel_file, signal_name

from .zygote import ZygoteUnfit

VMSTAT = "/proc/vmstat"
LOOK_S = 1.0
"""Minimum interval between two reads of the kernel's count."""


class OomWatch:
    """The kernel counts its out-of-memory kills, of any cgroup and of the machine as a whole; which processes they were
    is only in a log that few users may read. So this checks whether the count rose within the last seconds."""

    def __init__(self, vmstat: str = VMSTAT) -> None:
        self._vmstat = vmstat
        self._before = self._recent = self._read()
        self._looked_s = float("-inf")

    def look(self, now_s: float) -> None:
        """To be called often; reads at most once per LOOK_S."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._before, self._recent = self._recent, self._read()

    def struck(self) -> bool:
        """Whether the kernel has killed since the read before the last: one to two times LOOK_S ago."""
        return self._read() > self._before

    def _read(self) -> int:
        try:
            _, _, rest = kernel_file(self._vmstat).partition(b"\noom_kill ")
        except OSError:  # no descriptors, or no /proc: the count is not known
            return 0
        count = rest.partition(b"\n")[0]
        return int(count) if count.isdigit() else 0


def start_fresh(python: str, order: Fork, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the worker that `order` describes; `descriptors` as for the zygote. Raises OSError."""
    with contextlib.ExitStack() as files:
        order_file = files.enter_context(tempfile.TemporaryFile())  # the order may exceed the capacity of a pipe
        order_file.write(messages.encode(order))
        order_file.seek(0)
        channel, page, log = descriptors
        passed = [order_file.fileno(), channel, page, log]
        return subprocess.Popen(
            [python, "-m", "elastic.worker.boot.fresh", str(os.getpid()), *map(str, passed)],
            env=order.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
        )


class WorkerMessage(msgspec.Struct, frozen=True):
    worker_id: int
    message: FromWorker


class Exited(msgspec.Struct, frozen=True):
    worker_id: int
    code: int | None
    signal: str | None
    step: int
    """The last committed step on its beat page."""
    error_file: str = ""
    log_file: str = ""
    why: Reason | None = None
    """Why the process was never started, or could not go on; None: `code` and `signal` say all."""
    late_s: float = 0.0
    """Above 0: its script had ended with `code` this long before, and its process was killed as it had not exited."""
    oom: bool = False
    """Whether the kernel's out-of-memory killer was active at that moment, and the agent had not killed the process."""
    stopped: bool = False
    """A signal (SIGSTOP) had stopped the process when its agent killed it. Not a debugger, which traces it."""
    shortage: bool = False
    """It was never started, for lack of something on this node: see `is_shortage`."""
    misuse: str = ""
    """See messages.ScriptEnded."""
    terminated: bool = False
    """Its script has handled a SIGTERM that its agent did not send."""
    undone: bool = False
    """Its script has not come to its end: it failed, was killed from outside, or took too long for it."""

    @property
    def cause(self) -> Reason:
        if self.signal:
            how = reason(Code.OOM_KILLED if self.oom else Code.KILLED, signal=self.signal)
        else:
            how = reason(Code.AFTER_SIGTERM if self.terminated else Code.EXITED, status=self.code or 0)
        return self.why or how


class ProcessStarted(msgspec.Struct, frozen=True):
    """The process of a worker that was ordered runs."""

    worker_id: int


PoolEvent = WorkerMessage | ProcessStarted | Exited | messages.ZygoteReady | ZygoteUnfit


class Process(msgspec.Struct):
    """One worker process."""

    worker_id: int
    slot: int
    channel: socket.socket
    page: BeatPage
    error_file: str
    log_file: str
    started_s: float
    """When it was forked; until then, when it was ordered, which may be long before: the zygote imports first."""
    pid: int = 0
    pidfd: int = -1
    killed: bool = False
    stopped: bool = False
    """It was stopped by a signal when it was killed."""
    terminate_deadline_s: float = float("inf")
    spoke: bool = False
    """It has sent a message on its channel."""
    closed_s: float = float("inf")
    """When its channel was closed at the other end."""
    ended: bool = False
    """Its script has, with code 0."""
    script_code: int = 0
    """The exit code of its script, once that has ended; the process then has until `exit_deadline_s`."""
    exit_deadline_s: float = float("inf")
    late_s: float = 0.0
    """How long the process has for that."""
    late: bool = False
    """It was killed because it did not exit in that time."""
    unreadable: str = ""
    """It was killed because of a message that cannot be decoded: the decoder's error."""
    misuse: str = ""
    """See messages.ScriptEnded."""
    terminated: bool = False
    """See Exited."""
    child: subprocess.Popen[bytes] | None = None
    """Set for a worker that was started as a new process."""

    def heard(self, raw: bytes, exit_s: float) -> FromWorker | None:
        """Its message; None: it cannot be read, as from another version of elasticd. `exit_s`: see `late_s`."""
        self.spoke = True
        try:
            message = messages.from_worker(raw)
        except messages.UNREADABLE as error:
            self.unreadable = str(error)
            return None
        if isinstance(message, messages.ScriptEnded):
            self.script_code, self.late_s, self.misuse = message.code, exit_s, message.misuse
            self.terminated, self.ended = message.terminated and not self.killed, not message.code
            self.exit_deadline_s = time.monotonic() + exit_s
        return message

    def exited(self, code: int, number: int, oom: bool) -> Exited:
        """`code` counts where `number`, the signal that ended it, is 0; `oom`: a SIGKILL was the kernel's."""
        if late := self.late and bool(number):
            code, number = self.script_code, 0
        return Exited(
            worker_id=self.worker_id,
            code=None if number else code,
            signal=signal_name(number) if number and not self.unreadable else None,
            late_s=self.late_s if late else 0.0,
            step=self.page.read().step,
            error_file=self.error_file,
            log_file=self.log_file,
            why=reason(Code.UNREADABLE, self.unreadable) if self.unreadable else None,
            oom=oom and number == signal.SIGKILL,
            stopped=self.stopped,
            misuse=self.misuse,
            terminated=self.terminated,
            undone=not (self.ended or (self.killed and not self.late)) and bool(code or number or late),
        )
