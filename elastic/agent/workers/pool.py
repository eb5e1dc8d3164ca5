"""Worker processes on this node: forked from the zygote, messaged over sockets, waited for by pidfd.

Everything here is called from the loop's thread. The pool returns what happens as `PoolEvent`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import structlog

from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.worker import messages
from elastic.contract.worker.beat import PAGE_BYTES, Beat, BeatPage
from elastic.contract.worker.messages import Forked, Message
from elastic.contract.worker.worker_config import ERROR_FILE
from elastic.recovery.hangs.hang_rules import STOPPED_STATE
from elastic.util.capped_log import open_log
from elastic.util.descriptors import send
from elastic.util.processes import is_shortage

from . import descendants
from .descendants import Descendants, become_subreaper, ended, exit_status, signal_process
from .first_zygote import FirstZygote
from .gpu_gate import Gate
from .process import Exited as Exited
from .process import OomWatch, start_fresh
from .process import PoolEvent as PoolEvent
from .process import Process as Process
from .process import ProcessStarted as ProcessStarted
from .process import WorkerMessage as WorkerMessage
from .zygote import CLOSE_S, Zygote, ZygoteDied, ZygoteUnfit

CLOSED_S = 10.0
"""A worker that has sent messages, has closed its channel and lives on for this long is killed: messages cannot reach
it. The delay is for interpreters that run their exit handlers."""
LOOK_S = 2.0
"""Interval between scans of which processes descend from which worker."""

log = structlog.get_logger()


class Pool:
    """The node's zygote and its workers."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        python: str,
        preload: messages.Preload,
        grace_s: float,
        exit_s: float = float("inf"),
    ) -> None:
        """`grace_s`: time from SIGTERM to SIGKILL, and for the process of a failed script to exit; `exit_s`: time for
        the process of any other script to exit."""
        self.selector = selector
        self._grace_s, self._exit_s = grace_s, exit_s
        self._python = python
        self._zygote = Zygote(selector, python, preload)
        self._waiting: dict[int, tuple[messages.Fork, tuple[int, int, int]]] = {}
        self._held: set[int] = set()
        self._untold: list[PoolEvent] = []  # what follows from the pool's own actions: for the next call's events
        self._oom = OomWatch()
        self._family = Descendants()
        self._others = {pid: descendants.started(pid) for pid in descendants.children(os.getpid())}
        """Children that this process had before the pool was created, with their start times."""
        self._look_due_s = 0.0
        self.gate = Gate((), 0.0, lambda gpu: {})
        """Holds a worker back until its GPU is free; this initial one never does."""
        self.processes: dict[int, Process] = {}
        self._dying: dict[int, Process] = {}
        """Reported as exited already; the kernel has not signalled their end yet."""

    # ── zygote ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, env: Mapping[str, str], log_file: str, first: FirstZygote | None = None) -> None:
        """Start the zygote with `env`, or take `first`; its output goes to `log_file`."""
        become_subreaper()
        if died := self._zygote.start(env, log_file, first):
            self._zygote_died(died)

    def _zygote_event(self) -> Iterator[PoolEvent]:
        match self._zygote.read():
            case messages.ZygoteReady() as ready:
                yield ready
                for ticket in tuple(self._waiting):
                    self._order_when_free(ticket)
            case Forked() as forked:
                yield from self._forked(forked)
            case ZygoteDied() as died:
                self._zygote_died(died)
                yield from self._take_untold()
            case ZygoteUnfit() as unfit:
                yield from self._zygote_unfit(unfit)

    def _zygote_unfit(self, unfit: ZygoteUnfit) -> Iterator[PoolEvent]:
        """Waiting workers are started by the next zygote or, if there will be none, as new processes at once."""
        self._held.clear()
        yield unfit
        for ticket in tuple(self._waiting) if self._zygote.unfit else ():
            self._order_when_free(ticket)
        yield from self._take_untold()

    @property
    def why_fresh(self) -> str:
        """Why workers are started as new processes rather than forked; empty: they are forked."""
        return self._zygote.unfit

    def _zygote_died(self, died: ZygoteDied) -> None:
        """Workers live on; pending forks are ordered again from the next zygote, or given up if `died.barren`."""
        self._held.clear()
        if died.barren:
            why = reason(Code.ZYGOTE_DIES, died.how)
            for worker_id in tuple(self._waiting):
                self._give_up(worker_id, why, self._zygote.log_file, short=died.shortage)
        elif not self._waiting:
            self._zygote.excused()

    def _give_up(self, worker_id: int, why: Reason, log_file: str = "", *, short: bool = False) -> None:
        """Report a worker that was ordered and never started as exited."""
        for descriptor in self._waiting.pop(worker_id)[1]:
            os.close(descriptor)
        self._zygote.forget(worker_id)
        self._held.discard(worker_id)
        process = self.processes.pop(worker_id)
        if process.channel in self.selector.get_map():
            self.selector.unregister(process.channel)
        process.channel.close()
        log.warning("worker.never_began", slot=process.slot, worker_id=worker_id, why=why)
        log_file = log_file or process.log_file
        self._untold.append(Exited(worker_id, 1, None, 0, process.error_file, log_file, why, shortage=short))

    def _take_untold(self) -> list[PoolEvent]:
        taken, self._untold = self._untold, []
        return taken

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────

    def fork(
        self, worker_id: int, slot: int, env: Mapping[str, str], argv: Sequence[str], workdir: str, log_file: str
    ) -> None:
        """Order a worker, which starts once the zygote is up. If descriptors or memory for it are lacking, `tick`
        reports it as exited."""
        error_file = env.get(ERROR_FILE, "")
        order = messages.Fork(ticket=worker_id, env=dict(env), argv=tuple(argv), workdir=workdir)
        try:
            messages.encode(order)
            self._prepare(worker_id, slot, error_file, log_file, order)
        except (OSError, messages.TooLarge) as error:
            log.warning("worker.never_began", slot=slot, worker_id=worker_id, why=str(error))
            why, short = reason(Code.NOT_STARTED, str(error)), is_shortage(error)
            self._untold.append(Exited(worker_id, 1, None, 0, error_file, log_file, why, shortage=short))
            return
        if self._zygote.up or self._zygote.unfit:
            self._order_when_free(worker_id)

    def _prepare(self, worker_id: int, slot: int, error_file: str, log_file: str, order: messages.Fork) -> None:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(ours)
            undo.enter_context(theirs)
            memory = os.memfd_create(f"elastic-beat-{worker_id}")
            undo.callback(os.close, memory)
            os.ftruncate(memory, PAGE_BYTES)
            page = BeatPage(memoryview(mmap.mmap(memory, PAGE_BYTES)))
            now_s = time.monotonic()
            page.clear(now_s)
            output = open_log(log_file)
            undo.callback(os.close, output)
            self.selector.register(ours, selectors.EVENT_READ, ("worker", worker_id))
            undo.pop_all()
        self._waiting[worker_id] = (order, (theirs.detach(), memory, output))
        self.processes[worker_id] = Process(
            worker_id=worker_id,
            slot=slot,
            channel=ours,
            page=page,
            error_file=error_file,
            log_file=log_file,
            started_s=now_s,
        )

    def _order_when_free(self, worker_id: int) -> None:
        self._held.discard(worker_id)
        if self.gate.closed(self.processes[worker_id].slot, time.monotonic()):
            self._held.add(worker_id)  # `tick` tries again
        elif self._zygote.unfit:
            self._start_fresh(worker_id)
        elif not self._zygote.order(*self._waiting[worker_id]):
            self._held.add(worker_id)

    def _start_fresh(self, worker_id: int) -> None:
        """Start a worker as a new process, which imports everything itself."""
        process, (order, descriptors) = self.processes[worker_id], self._waiting[worker_id]
        try:
            process.child = start_fresh(self._python, order, descriptors)
            self._began(process, process.child.pid)
        except OSError as error:
            if process.child is not None:
                process.child.kill()
                process.child.wait()
            self._give_up(worker_id, reason(Code.NOT_STARTED, str(error)), short=is_shortage(error))

    def _forked(self, message: Forked) -> Iterator[PoolEvent]:
        if message.ticket not in self._waiting:
            return
        process = self.processes[message.ticket]
        try:
            if message.pid <= 0:
                raise OSError(errno.EAGAIN, "fork failed: no memory, or too many processes")
            self._began(process, message.pid)
        except OSError as error:
            self._give_up(message.ticket, reason(Code.NOT_STARTED, str(error)), short=is_shortage(error))
        else:
            self._zygote.proved()
        yield from self._take_untold()

    def _began(self, process: Process, pid: int) -> None:
        """The worker runs, as process `pid`. Raises OSError when it cannot be waited for."""
        pidfd = os.pidfd_open(pid)
        _, descriptors = self._waiting.pop(process.worker_id)
        for descriptor in descriptors:
            os.close(descriptor)
        process.pid, process.pidfd, process.started_s = pid, pidfd, time.monotonic()
        self._untold.append(ProcessStarted(process.worker_id))
        self.selector.register(process.pidfd, selectors.EVENT_READ, ("exit", process.worker_id))
        if process.killed:
            self.kill(process.worker_id)

    def beats(self) -> dict[int, Beat]:
        """Worker id -> what its page shows now."""
        return {worker_id: process.page.read() for worker_id, process in self.processes.items()}

    def tell(self, worker_id: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to a worker; it is dropped if the worker is gone, or does not read."""
        process = self.processes.get(worker_id)
        if process is None:
            return
        try:
            send(process.channel, messages.encode(message), descriptors, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError as error:  # the worker is stopped and its socket full; or too many descriptors are in flight
            log.warning("worker.cannot_be_told", slot=process.slot, what=type(message).__name__, error=str(error))

    def kill(self, worker_id: int, graceful: bool = False, late: bool = False) -> None:
        """Send SIGKILL to the worker's process group; `graceful`: SIGTERM to the worker alone, SIGKILL after the grace
        period. `late`: it was to exit by itself, and its time for that is over."""
        process = self.processes.get(worker_id)
        if process is None:
            return
        process.killed = True
        if late and self._exit_s < float("inf"):
            process.late, process.late_s = True, self._exit_s
        if process.pidfd < 0:
            if not self._zygote.owes(worker_id):  # it need not wait for the zygote
                self._give_up(worker_id, reason(Code.ENDED_UNSTARTED))
            return  # else killed when it appears
        if graceful:
            process.terminate_deadline_s = time.monotonic() + self._grace_s
        process.stopped = descendants.state(process.pid) == STOPPED_STATE
        signal_process(process.pid, signal.SIGTERM) if graceful else descendants.end_group(process.pid)

    def give_grace(self, process: Process) -> None:
        """Its script has failed: its process gets no more time to exit than one that receives SIGTERM."""
        process.late_s = min(self._grace_s, self._exit_s)
        process.exit_deadline_s = time.monotonic() + process.late_s

    def tick(self) -> list[PoolEvent]:
        """To be called every beat. Returns workers that have exited or could not be started, and unfit zygotes."""
        now_s = time.monotonic()
        self._oom.look(now_s)
        happened: list[PoolEvent] = []
        match self._zygote.tick(now_s):
            case ZygoteDied() as died:
                self._zygote_died(died)
            case ZygoteUnfit() as unfit:
                happened += self._zygote_unfit(unfit)
        for worker_id in tuple(self._held) if self._zygote.up or self._zygote.unfit else ():
            self._order_when_free(worker_id)
        closed: list[PoolEvent] = []
        for process in tuple(self.processes.values()):
            if now_s >= process.terminate_deadline_s:
                process.terminate_deadline_s = float("inf")
                self.kill(process.worker_id)
            if now_s >= process.closed_s and process.exit_deadline_s == float("inf"):
                closed += self._closed(process, now_s)
            if now_s >= process.exit_deadline_s:
                process.exit_deadline_s, process.late = float("inf"), True
                log.warning("worker.exits_late", slot=process.slot, worker_id=process.worker_id, after_s=process.late_s)
                self.kill(process.worker_id)
                process.killed = False  # not killed on request: its own fault
        return [*happened, *closed, *self._take_untold()]

    def handle(self, key: tuple[str, int]) -> list[PoolEvent]:
        """The events that follow from a readable descriptor of the pool."""
        kind, worker_id = key
        if kind == "zygote":
            return list(self._zygote_event())
        if kind == "exit" and worker_id in self._dying:
            self._reap(self._dying[worker_id])
            return []
        process = self.processes.get(worker_id)
        if process is None:
            return []
        if kind == "worker":
            return list(self._heard(process))
        return list(self._exited(process))

    def _heard(self, process: Process) -> Iterator[PoolEvent]:
        try:
            raw = process.channel.recv(messages.MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            raw = b""
        if raw:
            if (message := process.heard(raw, self._exit_s)) is None:
                log.error("worker.message_unreadable", slot=process.slot, pid=process.pid, error=process.unreadable)
                self.kill(process.worker_id)
                return
            yield WorkerMessage(process.worker_id, message)
        else:
            self.selector.unregister(process.channel)
            process.closed_s = time.monotonic()
            yield from self._closed(process, process.closed_s)

    def _closed(self, process: Process, now_s: float) -> Iterator[PoolEvent]:
        """Its channel has reached end of file. Mostly the process is exiting, and counts as lost from now on, though
        the kernel may take a while to signal its end; otherwise messages cannot reach it any more."""
        if process.pidfd < 0:
            return
        if (status := exit_status(process.pid)) is not None:
            self._dying[process.worker_id] = process
            yield self._lost(process, os.WEXITSTATUS(status), os.WTERMSIG(status))
        elif process.spoke and now_s - process.closed_s >= CLOSED_S and not process.killed:
            log.warning("worker.closed_its_channel", slot=process.slot, pid=process.pid)
            self.kill(process.worker_id)

    def _exited(self, process: Process) -> Iterator[PoolEvent]:
        # Messages that it sent before it exited come first.
        while process.channel in self.selector.get_map():
            before = list(self._heard(process))
            if not before:
                break
            # ScriptEnded is dropped: the exit status of the process shows how the script ended.
            yield from (
                h for h in before if not (isinstance(h, WorkerMessage) and isinstance(h.message, messages.ScriptEnded))
            )
        if process.worker_id in self._dying:
            self._reap(self._dying[process.worker_id])
            return
        if (result := os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            return
        by_signal = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        code, number = (0, result.si_status) if by_signal else (result.si_status, 0)
        yield self._lost(process, code, number)
        self._reap(process)

    def _lost(self, process: Process, code: int, number: int) -> Exited:
        """The process no longer runs, and has not been reaped."""
        # Children that it left behind keep its sockets open. Its pid is not reused before it is reaped.
        descendants.end_group(process.pid)
        del self.processes[process.worker_id]
        self.gate.died(process.pid, time.monotonic())
        return process.exited(code, number, oom=not process.killed and self._oom.struck())

    def _reap(self, process: Process) -> None:
        """Reap a process whose end the kernel has signalled, and close its descriptors."""
        with contextlib.suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG)
            if result is None:
                return
            if process.child is not None:
                process.child.returncode = result.si_status  # else Popen would wait for that process id again
        self._dying.pop(process.worker_id, None)
        self.selector.unregister(process.pidfd)
        if process.channel in self.selector.get_map():
            self.selector.unregister(process.channel)
        os.close(process.pidfd)
        process.channel.close()
        self.reap()

    def reap(self) -> None:
        """Reap dead orphans of workers, which have become children of the agent, and kill those that belong to no
        living worker."""
        if self._zygote.owes_answers:
            return  # the pid of a worker that died right after its fork is not known yet
        ours = self._orphans()
        for child in ours:
            if descendants.state(child) == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
        living = {p.pid for p in self.processes.values() if p.pid}
        if (now_s := time.monotonic()) >= self._look_due_s:
            self._look_due_s = now_s + LOOK_S
            self._family.look(living)
        for process in self._family.orphans(ours, living):
            if descendants.end(process):
                log.warning("orphan.ended", pid=process.pid)

    def _orphans(self) -> list[int]:
        """Children that neither this process nor the zygote has started. Processes started here (py-spy, the writer)
        are in this session; a program that embeds a pool may have had other children before."""
        own = {p.pid for p in (*self.processes.values(), *self._dying.values())} | {self._zygote.pid}
        session = os.getsid(0)
        return [
            pid
            for pid in descendants.children(os.getpid())
            if pid not in own
            and descendants.session(pid) != session
            and self._others.get(pid) != descendants.started(pid)
        ]

    def close(self) -> None:
        """Kill everything that is left, and wait until it is gone, CLOSE_S seconds at most: a process stuck in the
        kernel exits later. Safe to call twice."""
        deadline_s = time.monotonic() + CLOSE_S
        for process in self.processes.values():
            if process.pidfd >= 0:
                descendants.end_group(process.pid)
        for process in (*self.processes.values(), *self._dying.values()):
            if process.pidfd >= 0:
                if not ended(process.pidfd, deadline_s):
                    log.error("worker.does_not_end", slot=process.slot, pid=process.pid)
                if process.child is not None:
                    process.child.returncode = -signal.SIGKILL
                os.close(process.pidfd)
            process.channel.close()
        self.processes.clear()
        self._dying.clear()
        descendants.end_all(self._orphans, deadline_s)
        for _, descriptors in self._waiting.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._waiting.clear()
        self._zygote.close()
