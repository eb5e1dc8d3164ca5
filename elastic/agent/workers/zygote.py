"""The agent's side of the zygote, the process that forks workers: its start and restart, orders and answers.

Everything here is called from the loop's thread; `Pool` decides what to fork.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec
import structlog

from elastic.contract.worker import messages
from elastic.contract.worker.messages import Fork, Forked, ForkRefused, Preload, ZygoteReady
from elastic.util.capped_log import open_log
from elastic.util.descriptors import send
from elastic.util.processes import is_shortage

from .first_zygote import ZYGOTE, FirstZygote, ForkedChild

RESTART_S, RESTART_MAX_S = 0.2, 10.0
"""Pause before a dead zygote is restarted: the first, and the longest."""
BARREN_DEATHS = 3
"""After this many deaths without a fork in between the zygote itself is at fault: waiting workers are given up."""
ANSWER_S = 60.0
"""A zygote that leaves an order unanswered for this long is stuck, and is replaced."""
PRELOAD_S = 120.0
"""A zygote whose imports for the job take longer is killed, and the next one is started without them."""
CLOSE_S = 5.0

log = structlog.get_logger()


class ZygoteDied(msgspec.Struct, frozen=True):
    how: str
    barren: bool
    """It has died BARREN_DEATHS times or more without forking: waiting workers are given up."""
    shortage: bool
    """It could not be started for lack of something on this node, or was killed: by the kernel, mostly."""


class ZygoteUnfit(msgspec.Struct, frozen=True):
    """The zygote must not be forked from, and has been killed."""

    why: str
    preload: Preload
    """Its imports for the job. If not empty, the next zygote is started without them, else there is none."""


class Zygote:
    """At most one process at a time; when it has died, `tick` starts the next."""

    def __init__(self, selector: selectors.BaseSelector, python: str, preload: Preload) -> None:
        self._selector = selector
        self._python = python
        self._preload = preload
        self._started_s = 0.0
        self._process: subprocess.Popen[bytes] | ForkedChild | None = None
        self._control: socket.socket | None = None
        self._env: dict[str, str] = {}
        self._ordered: dict[int, float] = {}
        """Ticket of each unanswered order -> when it was sent."""
        self._deaths = 0
        """Deaths since a zygote last forked a worker."""
        self._restart_s = float("inf")
        self.log_file = ""
        self.up = False
        """It has reported that it is ready for orders."""
        self.unfit = ""
        """Why there is no zygote on this node for good; empty: there is one, or will be."""

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def owes_answers(self) -> bool:
        return bool(self._ordered)

    def owes(self, ticket: int) -> bool:
        """Whether it has received this order and not answered."""
        return ticket in self._ordered

    def start(self, env: Mapping[str, str], log_file: str, first: FirstZygote | None = None) -> ZygoteDied | None:
        """Start it with `env`; its output goes to `log_file`. Returns its death if the system cannot start it. `first`
        is taken in its place if it is for the same."""
        self._env, self.log_file = dict(env), log_file
        if first is not None and not first.fits(self._python, env, self._preload):
            log.info("zygote.first_is_of_no_use", pid=first.pid)
            self._process, self._control, first = ForkedChild(first.pid), first.control, None
            self._end()
        return self._start(first)

    def _start(self, first: FirstZygote | None = None) -> ZygoteDied | None:
        self._restart_s = float("inf")
        try:
            self._process, self._control = (ForkedChild(first.pid), first.control) if first else self._popen()
        except OSError as error:
            self._process = self._control = None
            return self._died(str(error), shortage=is_shortage(error))
        self.up, self._started_s = False, time.monotonic()
        self._selector.register(self._control, selectors.EVENT_READ, ("zygote", 0))
        return None

    def _popen(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.enter_context(ours)
            with theirs, open(open_log(self.log_file), "ab") as output:
                process = subprocess.Popen(
                    [
                        *(self._python, "-m", ZYGOTE),
                        str(theirs.fileno()),
                        str(os.getpid()),
                        messages.encode_preload(self._preload).decode(),
                    ],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            undo.pop_all()
        return process, ours

    def order(self, order: Fork, descriptors: Sequence[int]) -> bool:
        """Send an order. Returns False if its socket is full: the order must be sent again later."""
        assert self._control is not None
        try:
            send(self._control, messages.encode(order), descriptors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # its death is seen on the next read
        self._ordered[order.ticket] = time.monotonic()
        return True

    def forget(self, ticket: int) -> None:
        """Stop waiting for an answer to this order."""
        self._ordered.pop(ticket, None)

    def proved(self) -> None:
        """It has forked a worker: earlier deaths no longer count."""
        self._deaths = 0

    def excused(self) -> None:
        """No worker was waiting when it died, so no worker is affected: count this death only."""
        self._deaths = 1

    def read(self) -> ZygoteReady | Forked | ZygoteDied | ZygoteUnfit | None:
        """The next message or event from its readable socket."""
        if self._control is None:
            return None
        try:
            raw = self._control.recv(messages.MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return None  # reset: it died with an order unread. Its messages come next, then end of file
        if not raw:
            return self._gone()
        message = messages.from_zygote(raw)
        match message:
            case ForkRefused(why=why) | ZygoteReady(unfit=why) if why:
                return self._retire(why)
            case ZygoteReady():
                self.up = True
            case Forked(ticket=ticket):
                self.forget(ticket)
            case _:
                return None
        return message

    def _retire(self, why: str) -> ZygoteUnfit | ZygoteDied:
        """Kill it. If it had imports for the job, start one without them; else none is started any more."""
        had = self._preload
        assert self._control is not None
        self._selector.unregister(self._control)
        self._end()
        self.up = False
        self._ordered.clear()
        if not had:
            self.unfit = why
        else:
            self._preload = Preload()
            if died := self._start():
                return died
        return ZygoteUnfit(why, had)

    def _gone(self) -> ZygoteDied:
        assert self._control is not None
        assert self._process is not None
        self._selector.unregister(self._control)
        self._control.close()
        self._control = None
        self._process.kill()  # it may only have closed its end
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=2)
        return self._died(f"exit code {code}", shortage=code == -signal.SIGKILL)

    def _died(self, how: str, *, shortage: bool) -> ZygoteDied:
        self.up = False
        self._ordered.clear()
        self._deaths += 1
        pause_s = min(RESTART_MAX_S, RESTART_S * 2.0 ** min(self._deaths - 1, 10))
        self._restart_s = time.monotonic() + pause_s
        log.warning("zygote.died", how=how, deaths=self._deaths, again_in_s=pause_s)
        return ZygoteDied(how, barren=self._deaths >= BARREN_DEATHS, shortage=shortage)

    def tick(self, now_s: float) -> ZygoteDied | ZygoteUnfit | None:
        """To be called every beat. Starts the next one when that is due; returns its death if that fails, or why it was
        retired."""
        if now_s >= self._restart_s:
            return self._start()
        if self._preload and not self.up and self._control is not None and now_s - self._started_s > PRELOAD_S:
            return self._retire(f"its imports for the job took longer than {PRELOAD_S:g} s")
        if self._ordered and self._process is not None and now_s - min(self._ordered.values()) > ANSWER_S:
            log.error("zygote.stuck", orders=len(self._ordered), after_s=ANSWER_S)
            self._ordered.clear()
            self._process.kill()  # its end is seen on its socket
        return None

    def close(self) -> None:
        """Kill it, and wait until it is gone, CLOSE_S seconds at most. Safe to call twice."""
        self._restart_s = float("inf")
        self._ordered.clear()
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(timeout=CLOSE_S)
            except subprocess.TimeoutExpired:
                log.error("zygote.does_not_end", pid=self._process.pid)
            self._process = None
