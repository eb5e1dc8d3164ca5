"""Helper threads: they block and enqueue. A failed one ends the process: a restart by systemd is better than a daemon
that lacks a thread and appears healthy."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from .log import Log

T = TypeVar("T")

EXIT_CODE = 70
"""EX_SOFTWARE: a bug of ours."""


class Threads:
    def __init__(self, log: Log) -> None:
        self._log = log
        self.closed = threading.Event()
        """Set when the daemon ends: what is repeated is not done again."""

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Raises RuntimeError at a limit of threads: a daemon that has just begun ends then, and is started again."""
        thread = threading.Thread(target=self.run, args=(name, work), name=name, daemon=True)
        thread.start()
        return thread

    def try_start(self, name: str, work: Callable[[], None]) -> bool:
        """False at a limit of threads, which is logged: that passes, and must not end a daemon that serves."""
        try:
            self.start(name, work)
        except RuntimeError as error:
            self._log.error("daemon.no_thread", thread=name, why=str(error))
            return False
        return True

    def repeat(self, name: str, work: Callable[[], float | None], first_s: float = 0.0) -> threading.Thread:
        """Do `work` in a thread again and again: after `first_s`, then as many seconds later as it returns."""

        def run() -> None:
            pause_s = first_s
            while not self.closed.wait(pause_s):
                pause_s = work() or 0.0

        return self.start(name, run)

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Do `work` in this thread. If it raises, the process ends."""
        try:
            return work()
        except Exception:  # noqa: BLE001 - of whatever kind: it must not go unseen
            fail_stop(self._log, name)


def fail_stop(log: Log, where: str, error: BaseException | None = None) -> NoReturn:
    """Log `error`, or the exception being handled, and end the process at once."""
    log.critical("daemon.failed", where=where, exc_info=error or True)
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def fail_stop_whatever_fails(log: Log) -> None:
    """The same for threads not started by `Threads`: etcd's watch, the renewal of a lease."""

    def failed(args: threading.ExceptHookArgs) -> None:
        fail_stop(log, args.thread.name if args.thread else "a thread", args.exc_value)

    threading.excepthook = failed
