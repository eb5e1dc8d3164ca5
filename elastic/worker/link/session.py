"""The worker's connection to its agent: a monitor thread that can free the main thread, and the beat page.

The monitor owns the reading side of the channel. It acts at once on a message that cannot wait for the main thread
(AbortGroup: abort the group), records Form, StopAtStep, Finish and SaveSoon for the main thread, and calls the
registered handlers for the others.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic.contract.worker import messages
from elastic.contract.worker.beat import PAGE_BYTES, PULSE_S, BeatPage, Doing
from elastic.contract.worker.messages import AbortGroup, Finish, Form, Message, SaveSoon, StopAtStep

CHANNEL_ENV = "ELASTIC_CHANNEL_FD"
PAGE_ENV = "ELASTIC_BEAT_FD"

AGENT_GONE_EXIT = 78
"""Exit code of a worker whose agent has died: no process is left to direct the job."""

LOOK_S = 0.05
"""In place of PULSE_S, while a thread is about to leave an aborted group."""

IN_COLLECTIVE = ("/torch/autograd/", "/torch/distributed/", "/elastic/worker/comm/")
"""Code in which a thread waits for other ranks."""

MAX_DESCRIPTORS = 253
"""The kernel's limit for one message."""

LATE_S = 0.5
"""At least so long, and 1.5 times the last step, a rank that hears too late of a planned change leaves the step under
way to be completed by all ranks, before it aborts its group."""

WORKER_ENV = "ELASTIC_WORKER_PID"
"""The worker's process id. A child process that inherits the environment is no worker: its `elastic.run` is
standalone."""


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether this process was started by an agent."""
    return CHANNEL_ENV in environment and environment.get(WORKER_ENV) == str(os.getpid())


class Abortable(Protocol):
    def abort(self, why: str) -> None: ...


class GenerationEnded(BaseException):
    """This generation is over for this worker; the process and its state remain. As KeyboardInterrupt it is no
    Exception, so that a loop that skips a bad batch, `except Exception: continue`, does not catch it."""

    def __init__(self, why: str, *, between: bool = False) -> None:
        """`between`: see messages.GroupClosed."""
        super().__init__(why)
        self.between = between


class Session:
    """One worker's session with its agent."""

    def __init__(self, channel: socket.socket, page: memoryview) -> None:
        self.page = BeatPage(page)
        self._channel = channel
        self._changed = threading.Condition()
        self._forms: deque[Form] = deque()
        self.finished = False
        """The job is over on all ranks."""
        self._ended = 0  # newest generation that is over; the reason is `why`
        self.why = ""
        self._yield_generation, self._yield_step = 0, 0
        self._give_up_s = math.inf
        """When the group of `_yield_generation` is aborted, unless the step under way is committed before."""
        self._group: Abortable | None = None
        self._group_generation = 0
        self._thread = 0
        """That which holds the group."""
        self._aborted = False
        """That group was aborted, and the thread was not found to have left it yet."""
        self._handlers: dict[type[Message], Callable[[Message, list[int]], None]] = {}
        self.save_wanted = False
        self.stop_wanted = False
        self.step = 0
        """Number of committed steps, for the monitor thread."""
        self.step_s = 0.0
        """How long the newest one took."""
        self.committed_in, self.committed_s = 0, 0.0
        """The generation in which it was committed here, and the instant."""

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Session | None:
        """None if this process was not started by an agent."""
        if not is_worker(environment):
            return None
        channel = socket.socket(fileno=int(environment[CHANNEL_ENV]))
        page = mmap.mmap(int(environment[PAGE_ENV]), PAGE_BYTES)
        return Session(channel, memoryview(page))

    def start(self) -> None:
        """Start the monitor thread."""
        threading.Thread(target=self._monitor, name="elastic-monitor", daemon=True).start()

    def on(self, kind: type[Message], handler: Callable[[Message, list[int]], None]) -> None:
        """Call `handler(message, descriptors)` in the monitor thread."""
        self._handlers[kind] = handler

    # ── main thread ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> None:
        try:
            self._channel.send(messages.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(AGENT_GONE_EXIT)

    def beat(self, doing: Doing) -> None:
        self.page.write(doing, time.monotonic())

    def copied(self, nbytes: int) -> None:
        """The main thread has copied `nbytes` more bytes: it is not hung, however long the whole copy takes."""
        self.page.copied(time.monotonic())

    def stood_still(self, seconds: float) -> None:
        """The main thread has waited so long for the copy of a snapshot."""
        self.page.waited(stall_s=seconds)

    def next_form(self) -> Form | None:
        """Wait for the next generation to form; None when the job is over."""
        with self._changed:
            while not self.finished:
                while self._forms:
                    form = self._forms.popleft()
                    if form.generation > self._ended:
                        return form
                # No deadline: only the agent determines what is next, and this process ends with it.
                self._changed.wait()
        return None

    def wait_after_done(self, generation: int) -> None:
        """Wait until the job or `generation` is over."""
        with self._changed:
            while not self.finished and self._ended < generation and not self._forms:
                self._changed.wait()

    def wait(self, there: Callable[[], bool], generation: int, limit_s: float) -> None:
        """Wait until `there()`, which a handler makes true, or for `limit_s` seconds. Raises GenerationEnded."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self._ended >= generation, limit_s)
            if self._ended >= generation:
                raise GenerationEnded(self.why)

    def holds(self, group: Abortable | None, generation: int) -> None:
        """Register the group to abort on the agent's request. If its generation is already over, it is aborted at
        once."""
        with self._changed:
            self._group, self._group_generation = group, generation
            self._thread, self._aborted = threading.get_ident(), False
            if group is None:  # the script has left `train`: an abort that hangs from here on has `abort_s`
                self.page.returned()
            late = group is not None and self._ended >= generation
            why = self.why
        if late and group is not None:
            group.abort(why)

    def over(self, generation: int) -> bool:
        return self._ended >= generation

    def check(self, generation: int, step: int, *, between: bool = False) -> None:
        """Raises GenerationEnded, with `between`, if `generation` is over, or is to stop at `step`."""
        self.step = step
        if self._ended >= generation:
            self.page.left(time.monotonic())
            raise GenerationEnded(self.why, between=between)
        if self._yield_generation == generation and step >= self._yield_step:
            raise GenerationEnded(f"planned change after step {step}", between=between)

    def stops_after(self, generation: int, step: int) -> bool:
        """Whether all ranks stop after `step`, by plan."""
        return self._yield_generation == generation and step >= self._yield_step and not self.over(generation)

    def ends(self, generation: int) -> bool:
        """Whether `generation` is over, or this rank has passed the step at which it was to stop: others may have left
        the group."""
        return self.over(generation) or (self._yield_generation == generation and self.step >= self._yield_step)

    def ends_within(self, generation: int, limit_s: float) -> bool:
        """`ends`, or it is over within `limit_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= generation, limit_s)
        return self.ends(generation)

    # ── monitor thread ──────────────────────────────────────────────────────────────────────────────────────

    def _monitor(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while True:
            # A thread that cannot get the GIL cannot report it: the absence of a pulse shows that no Python code runs
            # here.
            self._look(now_s := time.monotonic())
            if not poller.poll(self._patience_s(now_s) * 1000):
                continue
            try:
                raw, descriptors, _, _ = socket.recv_fds(self._channel, messages.MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
            except OSError:
                raw, descriptors = b"", []
            if not raw:
                os._exit(AGENT_GONE_EXIT)
            self._take(messages.to_worker(raw), descriptors)

    def _look(self, now_s: float) -> None:
        self.page.pulse(now_s)
        # In the script's own code elastic's next call raises, see `check`. A collective has raised once the thread's
        # frames show none any more, whatever the script does since: its time is no sign that it cannot abort.
        with self._changed:
            if self._aborted and self.page.doing == Doing.EXCHANGING and not self._in_collective():
                self._aborted = False
                self.page.left(now_s)

    def _in_collective(self) -> bool:
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if any(place in frame.f_code.co_filename for place in IN_COLLECTIVE):
                return True
            frame = frame.f_back
        return False

    def _take(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case AbortGroup(generation=generation, why=why):
                self._abort(generation, str(why))
            case StopAtStep(generation=generation, at_step=at_step, why=why):
                with self._changed:
                    self._yield_generation, self._yield_step, self.why = generation, at_step, str(why)
                # This rank has passed the step at which the others may have stopped. If all take part in the step under
                # way, it ends with that one. To abort it at once could lose it: a rank that leaves the job may have
                # committed it, and the others not. If one has stopped, no rank can commit it.
                late = self.step > at_step
                self._give_up_s = time.monotonic() + max(LATE_S, 1.5 * self.step_s) if late else math.inf
            case Form():
                self.stop_wanted = False
                with self._changed:
                    self._forms.append(message)
                    self._changed.notify_all()
            case Finish():
                with self._changed:
                    self.finished = True
                    self._changed.notify_all()
            case SaveSoon(stop=stop):
                self.save_wanted = True
                self.stop_wanted = self.stop_wanted or stop
            case _:
                if handler := self._handlers.get(type(message)):
                    handler(message, descriptors)
                    with self._changed:
                        self._changed.notify_all()  # a thread may `wait` for it

    def _patience_s(self, now_s: float) -> float:
        """How long to wait for the next message. Aborts the group if an order to stop came too late, and the step that
        was under way then is still not committed: a rank has most likely stopped before it."""
        if now_s < self._give_up_s:
            return min(PULSE_S, self._give_up_s - now_s)
        self._give_up_s = math.inf
        if self._group is not None and self._group_generation == self._yield_generation:
            self._abort(self._yield_generation, self.why)
        return LOOK_S if self._aborted else PULSE_S

    def _abort(self, generation: int, why: str) -> None:
        with self._changed:
            self._ended, self.why = max(self._ended, generation), why
            group = self._group if self._group_generation <= generation else None
            self._changed.notify_all()
        if group is not None:
            group.abort(why)
            with self._changed:
                self._aborted = self._group is group  # else the main thread has left it meanwhile
