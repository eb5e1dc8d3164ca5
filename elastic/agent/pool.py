"""Worker processes on this node: forked from the zygote, spoken to over sockets, waited for by pidfd.

Everything here is called from the loop's thread. The pool reports what happens as `Said` and `Exited`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from ..core import messages
from ..core.beat import PAGE_BYTES, BeatPage
from ..core.messages import Forked, FromWorker, Message
from .gpus import Gate
from .oom import OomWatch
from .zygote import CLOSE_S, Zygote, ZygoteDied

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
    error_file: str = ""
    log_file: str = ""
    why: str = ""
    """Why there never was a process; empty when there was."""
    oom: bool = False
    """Whether the kernel's out-of-memory killer was at work at that moment, and nobody of ours killed it."""

    @property
    def cause(self) -> str:
        if self.why:
            return self.why
        if self.oom:
            return f"killed by {self.signal}: out of memory (the kernel's OOM killer)"
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


class Pool:
    """The node's zygote and its workers."""

    def __init__(self, selector: selectors.BaseSelector, python: str, preload: Sequence[str], grace_s: float) -> None:
        self._selector = selector
        self._grace_s = grace_s
        self._zygote = Zygote(selector, python, preload)
        self._waiting: dict[int, tuple[messages.Fork, tuple[int, int, int]]] = {}
        self._held: set[int] = set()
        self._never_began: list[Exited] = []
        self._oom = OomWatch()
        self.gate = Gate((), 0.0, lambda gpu: {})
        """Holds a worker back until its GPU is free; as constructed it never does."""
        self.processes: dict[int, Process] = {}

    # ── zygote ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, env: Mapping[str, str], log_file: str) -> None:
        """Start the zygote with `env`; its output goes to `log_file`."""
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("cannot become a child subreaper: workers could not be waited for")
        if died := self._zygote.start(env, log_file):
            self._zygote_died(died)

    def _zygote_event(self) -> Iterator[Happening]:
        match self._zygote.read():
            case messages.ZygoteReady(seconds=seconds, problems=problems):
                yield ZygoteUp(seconds, problems)
                for ticket in tuple(self._waiting):
                    self._order_when_free(ticket)
            case Forked() as forked:
                yield from self._forked(forked)
            case ZygoteDied() as died:
                self._zygote_died(died)
                yield from self._take_never_began()

    def _zygote_died(self, died: ZygoteDied) -> None:
        """Workers live on; those whose fork was under way are asked for again, of the next one."""
        self._held.clear()
        if died.barren:
            why = f"the process that forks workers (zygote) dies before it has forked one: {died.how}"
            for life in tuple(self._waiting):
                self._give_up(life, why, self._zygote.log_file)
        elif not self._waiting:
            self._zygote.excused()

    def _give_up(self, life: int, why: str, log_file: str = "") -> None:
        """A worker that was ordered and never was."""
        _, descriptors = self._waiting.pop(life)
        for descriptor in descriptors:
            os.close(descriptor)
        self._zygote.forget(life)
        self._held.discard(life)
        process = self.processes.pop(life)
        if process.channel in self._selector.get_map():
            self._selector.unregister(process.channel)
        process.channel.close()
        log.warning("worker.never_began", slot=process.slot, life=life, why=why)
        self._never_began.append(
            Exited(life, 1, None, 0, process.error_file, log_file or process.log_file, why),
        )

    def _take_never_began(self) -> list[Exited]:
        taken, self._never_began = self._never_began, []
        return taken

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────

    def fork(
        self, life: int, slot: int, env: Mapping[str, str], argv: Sequence[str], workdir: str, log_file: str
    ) -> None:
        """Order a worker; it exists once the zygote is up. Where there is no room for one (descriptors, memory,
        disk), `tick` reports it as exited."""
        error_file = env.get("TORCHELASTIC_ERROR_FILE", "")
        order = messages.Fork(ticket=life, env=dict(env), argv=tuple(argv), workdir=workdir)
        try:
            self._prepare(life, slot, error_file, log_file, order)
        except OSError as error:
            log.warning("worker.never_began", slot=slot, life=life, why=str(error))
            why = f"a worker cannot be started: {error}"
            self._never_began.append(Exited(life, 1, None, 0, error_file, log_file, why))
            return
        if self._zygote.up:
            self._order_when_free(life)

    def _prepare(self, life: int, slot: int, error_file: str, log_file: str, order: messages.Fork) -> None:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(ours)
            undo.enter_context(theirs)
            memory = os.memfd_create(f"elastic-beat-{life}")
            undo.callback(os.close, memory)
            os.ftruncate(memory, PAGE_BYTES)
            page = BeatPage(memoryview(mmap.mmap(memory, PAGE_BYTES)))
            now_s = time.monotonic()
            page.clear(now_s)
            output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            undo.callback(os.close, output)
            self._selector.register(ours, selectors.EVENT_READ, ("worker", life))
            undo.pop_all()
        self._waiting[life] = (order, (theirs.detach(), memory, output))
        self.processes[life] = Process(
            life=life, slot=slot, channel=ours, page=page, error_file=error_file, log_file=log_file, started_s=now_s
        )

    def _order_when_free(self, life: int) -> None:
        self._held.discard(life)
        if self.gate.closed(self.processes[life].slot, time.monotonic()) or not self._zygote.order(
            *self._waiting[life]
        ):
            self._held.add(life)  # `tick` tries again

    def _forked(self, message: Forked) -> Iterator[Happening]:
        if message.ticket not in self._waiting:
            return
        process = self.processes[message.ticket]
        try:
            if message.pid <= 0:
                raise OSError("fork failed: no memory, or too many processes")
            pidfd = os.pidfd_open(message.pid)
        except OSError as error:
            self._give_up(message.ticket, f"a worker cannot be started: {error}")
            yield from self._take_never_began()
            return
        self._zygote.proved()
        _, descriptors = self._waiting.pop(message.ticket)
        for descriptor in descriptors:
            os.close(descriptor)
        process.pid, process.pidfd = message.pid, pidfd
        process.started_s = time.monotonic()
        self._selector.register(process.pidfd, selectors.EVENT_READ, ("exit", process.life))
        if process.killed:
            self.kill(process.life)

    def tell(self, life: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Say something to a worker; one that is gone already hears nothing, nor does one that reads nothing."""
        process = self.processes.get(life)
        if process is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            process.channel.sendmsg([messages.encode(message)], rights, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError as error:  # it is stopped and its socket full; or too many descriptors are in flight
            log.warning("worker.cannot_be_told", slot=process.slot, what=type(message).__name__, error=str(error))

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

    def tick(self) -> list[Happening]:
        """To be called every beat. Returns workers that could not be started."""
        now_s = time.monotonic()
        self._oom.look(now_s)
        if died := self._zygote.tick(now_s):
            self._zygote_died(died)
        for life in tuple(self._held) if self._zygote.up else ():
            self._order_when_free(life)
        for process in self.processes.values():
            if now_s >= process.terminate_deadline_s:
                process.terminate_deadline_s = float("inf")
                self.kill(process.life)
        return list(self._take_never_began())

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
        if os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        # Children that it left behind keep its sockets open. While it is a zombie its number is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        assert result is not None
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
            error_file=process.error_file,
            log_file=process.log_file,
            oom=by_signal and result.si_status == signal.SIGKILL and not process.killed and self._oom.struck(),
        )

    def reap(self) -> None:
        """Collect dead orphans of workers, which have become our children too."""
        if self._zygote.owes_answers:
            return  # a worker that died at birth is not known by its number yet
        known = {p.pid for p in self.processes.values()} | {self._zygote.pid}
        ours = os.getsid(0)
        for child in _children():
            # Whatever we started ourselves (py-spy, the writer) is in our session, and waited for by its Popen.
            if child not in known and _dead_in_session(child) not in (None, ours):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)

    def close(self) -> None:
        """End everything that is left, and wait until it is gone, CLOSE_S seconds at most: what hangs in the kernel
        goes when that lets it. Safe to call twice."""
        deadline_s = time.monotonic() + CLOSE_S
        for process in self.processes.values():
            if process.pidfd >= 0:
                _signal_group(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            if process.pidfd >= 0:
                if not _ended(process.pidfd, deadline_s):
                    log.error("worker.does_not_end", slot=process.slot, pid=process.pid)
                os.close(process.pidfd)
            process.channel.close()
        self.processes.clear()
        for _, descriptors in self._waiting.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._waiting.clear()
        self._zygote.close()


def _ended(pidfd: int, deadline_s: float) -> bool:
    """Wait for a child's end, and take its exit status."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    return True


def _dead_in_session(pid: int) -> int | None:
    """The session of a zombie; None: it lives, or is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _parent, _group, session = file.read().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(session) if state == "Z" else None


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Not (yet) the leader of its group: killed between its fork and its setsid.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    except PermissionError:
        log.warning("worker.cannot_be_signalled", pid=pid)


def _children() -> list[int]:
    pid = os.getpid()
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/children") as children:
            found += map(int, children.read().split())
    return found
