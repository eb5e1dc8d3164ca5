"""The worker's line to its agent: a monitor thread that can free the main thread, and the beat page.

The monitor owns the reading side of the channel. It acts at once on what cannot wait for the main thread (AbortGroup:
abort the group) and leaves the rest in a box that the main thread looks into.
"""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from ..core import messages
from ..core.beat import PAGE_BYTES, PULSE_S, BeatPage, Doing
from ..core.messages import AbortGroup, Finish, Form, Message, SaveSoon, StopAtStep

CHANNEL_ENV = "ELASTIC_CHANNEL_FD"
PAGE_ENV = "ELASTIC_BEAT_FD"

AGENT_GONE_EXIT = 78
"""Exit code of a worker whose agent has died: nobody is left to say what the job does next."""

MAX_DESCRIPTORS = 253
"""The kernel's limit for one message."""

WORKER_ENV = "ELASTIC_WORKER_PID"
"""The worker's process id. A child that inherits the environment is no worker: its `elastic.run` runs alone."""

DEFAULTS_ENV = "ELASTIC_PLAIN_DEFAULTS"
"""Names, separated by commas, of variables that were set for the case that the script is a plain one."""


class Abortable(Protocol):
    def abort(self, why: str) -> None: ...


class GenerationEnded(Exception):
    """This generation is over for this worker; the process and its state are not. Never for the user to catch."""


class Session:
    """One worker's conversation with its agent."""

    def __init__(self, channel: socket.socket, page: memoryview) -> None:
        self.page = BeatPage(page)
        self._channel = channel
        self._changed = threading.Condition()
        self._forms: deque[Form] = deque()
        self._finished = False
        self._ended = 0  # newest generation that is over, and why
        self._why = ""
        self._yield_generation, self._yield_step = 0, 0
        self._group: Abortable | None = None
        self._group_generation = 0
        self._handlers: dict[type[Message], Callable[[Message, list[int]], None]] = {}
        self.save_wanted = False
        self.stop_wanted = False
        self.step = 0
        """Steps committed: kept here for the monitor."""

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Session | None:
        """None when no agent started this process."""
        if CHANNEL_ENV not in environment or environment.get(WORKER_ENV) != str(os.getpid()):
            return None
        channel = socket.socket(fileno=int(environment[CHANNEL_ENV]))
        page = mmap.mmap(int(environment[PAGE_ENV]), PAGE_BYTES)
        return Session(channel, memoryview(page))

    def start(self) -> None:
        """Begin to listen."""
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
        """The main thread has copied so many bytes more: it is not hung, however long the whole copy takes."""
        self.page.copied(nbytes, time.monotonic())

    def next_form(self) -> Form | None:
        """Wait for a generation to form; None when the job is over."""
        with self._changed:
            while not self._finished:
                while self._forms:
                    form = self._forms.popleft()
                    if form.generation > self._ended:
                        return form
                # No deadline: only the agent can say what is next, and its end ends this process.
                self._changed.wait()
        return None

    def wait_after_done(self, generation: int) -> None:
        """Wait until the job is over or `generation` is."""
        with self._changed:
            while not self._finished and self._ended < generation and not self._forms:
                self._changed.wait()

    def wait(self, there: Callable[[], bool], generation: int, limit_s: float) -> None:
        """Until `there`, which a handler brings about, for `limit_s` at most. Raises GenerationEnded."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self._ended >= generation, limit_s)
            if self._ended >= generation:
                raise GenerationEnded(self._why)

    def holds(self, group: Abortable | None, generation: int) -> None:
        """The group to abort when the agent says so. One that was let go of meanwhile is aborted here and now."""
        with self._changed:
            self._group, self._group_generation = group, generation
            late = group is not None and self._ended >= generation
            why = self._why
        if late and group is not None:
            group.abort(why)

    def over(self, generation: int) -> bool:
        return self._ended >= generation

    @property
    def finished(self) -> bool:
        """The job is over for everybody."""
        return self._finished

    def check(self, generation: int, step: int) -> None:
        """Raises GenerationEnded when `generation` is over, or planned to end at `step`."""
        self.step = step
        if self._ended >= generation:
            raise GenerationEnded(self._why)
        if self._yield_generation == generation and step >= self._yield_step:
            raise GenerationEnded(f"planned change after step {step}")

    def why(self) -> str:
        return self._why

    # ── monitor thread ──────────────────────────────────────────────────────────────────────────────────────

    def _monitor(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while True:
            # A thread that does not get the interpreter's lock cannot say so: no pulse tells that nothing here runs.
            self.page.pulse(time.monotonic())
            if not poller.poll(PULSE_S * 1000):
                continue
            try:
                raw, ancillary, _, _ = self._channel.recvmsg(
                    messages.MAX_MESSAGE_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
                )
            except OSError:
                raw, ancillary = b"", []
            if not raw:
                os._exit(AGENT_GONE_EXIT)
            descriptors = array.array("i")
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
            self._take(messages.to_worker(raw), list(descriptors))

    def _take(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case AbortGroup(generation=generation, why=why):
                self._abort(generation, why)
            case StopAtStep(generation=generation, at_step=at_step, why=why):
                with self._changed:
                    self._yield_generation, self._yield_step, self._why = generation, at_step, why
                # Too late for a boundary that is already behind: the others may have stopped at it. Nothing is
                # lost by letting go in the middle of a step that nobody will commit.
                if self.step > at_step:
                    self._abort(generation, why)
            case Form():
                self.stop_wanted = False
                with self._changed:
                    self._forms.append(message)
                    self._changed.notify_all()
            case Finish():
                with self._changed:
                    self._finished = True
                    self._changed.notify_all()
            case SaveSoon(stop=stop):
                self.save_wanted = True
                self.stop_wanted = self.stop_wanted or stop
            case _:
                if handler := self._handlers.get(type(message)):
                    handler(message, descriptors)
                    with self._changed:
                        self._changed.notify_all()  # somebody may `wait` for it

    def _abort(self, generation: int, why: str) -> None:
        with self._changed:
            self._ended, self._why = max(self._ended, generation), why
            group = self._group if self._group_generation <= generation else None
            self._changed.notify_all()
        if group is not None:
            group.abort(why)
