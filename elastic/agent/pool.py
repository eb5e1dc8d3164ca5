"""Worker processes on this node: forked from the zygote, spoken to over sockets, waited for by pidfd.

Everything here is called from the loop's thread. The pool reports what happens as `Said` and `Exited`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from ..core import messages
from ..core.beat import PAGE_BYTES, BeatPage
from ..core.messages import Forked, FromWorker, Message, ZygoteReady
from .gpus import Gate

PR_SET_CHILD_SUBREAPER = 36

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Said:
    life: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Exited:
    life: int
    code: int | None
    signal: str | None
    step: int
    """The last step that its beat page shows as committed."""

    @property
    def cause(self) -> str:
        return f"killed by {self.signal}" if self.signal else f"exit code {self.code}"


@dataclass(frozen=True, slots=True)
class ZygoteUp:
    seconds: float
    problems: tuple[str, ...]


Happening = Said | Exited | ZygoteUp


@dataclass(slots=True)
class Process:
    """One worker process."""

    life: int
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
    terminate_deadline_s: float = float("inf")
    said_last: list[Message] = field(default_factory=list)


class Pool:
    """The node's zygote and its workers."""

    def __init__(self, selector: selectors.BaseSelector, python: str, preload: Sequence[str], grace_s: float) -> None:
        self._selector = selector
        self._python = python
        self._preload = tuple(preload)
        self._grace_s = grace_s
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._zygote_env: dict[str, str] = {}
        self._zygote_log = ""
        self._up = False
        self._waiting: dict[int, tuple[messages.Fork, tuple[int, int, int]]] = {}
        self._held: set[int] = set()
        self.gate = Gate((), 0.0, lambda gpu: {})
        """Holds a worker back until its GPU is free; as constructed it never does."""
        self.processes: dict[int, Process] = {}

    # ── zygote ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, env: Mapping[str, str], log_file: str) -> None:
        """Start the zygote with `env`; its output goes to `log_file`."""
        self._zygote_env, self._zygote_log = dict(env), log_file
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("cannot become a child subreaper: workers could not be waited for")
        self._start_zygote()

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [self._python, "-m", "elastic.worker.zygote", str(theirs.fileno()), str(os.getpid()), *self._preload]
        with theirs, open(self._zygote_log, "ab") as output:
            self._zygote = subprocess.Popen(
                command,
                env=self._zygote_env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control, self._up = ours, False
        self._selector.register(ours, selectors.EVENT_READ, ("zygote", 0))

    def _zygote_event(self) -> Iterator[Happening]:
        assert self._control is not None
        raw = self._control.recv(messages.MAX_MESSAGE_BYTES)
        if not raw:
            self._restart_zygote()
            return
        message = messages.from_zygote(raw)
        if isinstance(message, ZygoteReady):
            self._up = True
            yield ZygoteUp(message.seconds, message.problems)
            for ticket in tuple(self._waiting):
                self._order_when_free(ticket)
        elif isinstance(message, Forked):
            self._forked(message)

    def _restart_zygote(self) -> None:
        """It died. Workers live on; those whose fork was under way are asked for again."""
        assert self._control is not None
        assert self._zygote is not None
        self._selector.unregister(self._control)
        self._control.close()
        code = self._zygote.wait(timeout=10)
        log.warning("zygote.died", code=code)
        self._start_zygote()

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────

    def fork(
        self, life: int, slot: int, env: Mapping[str, str], argv: Sequence[str], workdir: str, log_file: str
    ) -> None:
        """Order a worker; it exists once the zygote is up."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create(f"elastic-beat-{life}")
        os.ftruncate(memory, PAGE_BYTES)
        page = BeatPage(memoryview(mmap.mmap(memory, PAGE_BYTES)))
        now_s = time.monotonic()
        page.clear(now_s)
        output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.processes[life] = Process(
            life=life,
            slot=slot,
            channel=ours,
            page=page,
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
            log_file=log_file,
            started_s=now_s,
        )
        self._selector.register(ours, selectors.EVENT_READ, ("worker", life))
        order = messages.Fork(ticket=life, env=dict(env), argv=tuple(argv), workdir=workdir)
        self._waiting[life] = (order, (theirs.detach(), memory, output))
        if self._up:
            self._order_when_free(life)

    def _order_when_free(self, life: int) -> None:
        self._held.discard(life)
        if self.gate.closed(self.processes[life].slot, time.monotonic()):
            self._held.add(life)  # `tick` tries again
        else:
            self._order(life)

    def _order(self, life: int) -> None:
        assert self._control is not None
        order, descriptors = self._waiting[life]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is seen on the next read
            self._control.sendmsg([messages.encode(order)], rights)

    def _forked(self, message: Forked) -> None:
        _, descriptors = self._waiting.pop(message.ticket)
        for descriptor in descriptors:
            os.close(descriptor)
        process = self.processes[message.ticket]
        process.pid = message.pid
        process.started_s = time.monotonic()
        process.pidfd = os.pidfd_open(message.pid)
        self._selector.register(process.pidfd, selectors.EVENT_READ, ("exit", process.life))
        if process.killed:
            self.kill(process.life)

    def tell(self, life: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Say something to a worker; one that is gone already hears nothing."""
        process = self.processes.get(life)
        if process is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.channel.sendmsg([messages.encode(message)], rights)

    def kill(self, life: int, gently: bool = False) -> None:
        """SIGKILL to the worker and all it has started; `gently`: SIGTERM, and SIGKILL after the grace."""
        process = self.processes.get(life)
        if process is None:
            return
        process.killed = True
        if process.pidfd < 0:
            return  # killed when it appears
        if gently:
            process.terminate_deadline_s = time.monotonic() + self._grace_s
        _signal_group(process.pid, signal.SIGTERM if gently else signal.SIGKILL)

    def tick(self) -> None:
        now_s = time.monotonic()
        for life in tuple(self._held) if self._up else ():
            self._order_when_free(life)
        for process in self.processes.values():
            if now_s >= process.terminate_deadline_s:
                process.terminate_deadline_s = float("inf")
                self.kill(process.life)

    def handle(self, key: tuple[str, int]) -> list[Happening]:
        """What a readable descriptor of ours means."""
        kind, life = key
        if kind == "zygote":
            return list(self._zygote_event())
        process = self.processes.get(life)
        if process is None:
            return []
        if kind == "worker":
            return list(self._heard(process))
        return list(self._exited(process))

    def _heard(self, process: Process) -> Iterator[Happening]:
        try:
            raw = process.channel.recv(messages.MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            raw = b""
        if raw:
            yield Said(process.life, messages.from_worker(raw))
        else:
            self._selector.unregister(process.channel)  # the exit follows

    def _exited(self, process: Process) -> Iterator[Happening]:
        # What it said before it died comes first.
        while process.channel in self._selector.get_map():
            before = list(self._heard(process))
            if not before:
                break
            yield from before
        result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        _signal_group(process.pid, signal.SIGKILL)  # children that it left behind keep its sockets open
        self._selector.unregister(process.pidfd)
        if process.channel in self._selector.get_map():
            self._selector.unregister(process.channel)
        os.close(process.pidfd)
        process.channel.close()
        del self.processes[process.life]
        self.gate.died(process.pid, time.monotonic())
        by_signal = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        yield Exited(
            life=process.life,
            code=None if by_signal else result.si_status,
            signal=signal.Signals(result.si_status).name if by_signal else None,
            step=process.page.read().step,
        )

    def reap(self) -> None:
        """Collect orphans of workers, which have become our children too."""
        known = {p.pid for p in self.processes.values()} | ({self._zygote.pid} if self._zygote else set())
        for child in _children():
            if child not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)

    def close(self) -> None:
        """End everything that is left, and wait until it is gone. Safe to call twice."""
        for process in tuple(self.processes.values()):
            if process.pidfd >= 0:
                _signal_group(process.pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
                os.close(process.pidfd)
            process.channel.close()
        self.processes.clear()
        for _, descriptors in self._waiting.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._waiting.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait(timeout=10)
            self._zygote = None


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Not (yet) the leader of its group: killed between its fork and its setsid.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> list[int]:
    pid = os.getpid()
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/children") as children:
            found += map(int, children.read().split())
    return found
