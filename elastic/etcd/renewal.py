"""Takes renewed certificates into use: a connection keeps those it was opened with, even once they have expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .keepers import start_thread
from .types import EtcdError, EtcdUnavailable

if TYPE_CHECKING:
    from .wire import Connection

EVERY_S = 15.0
"""Interval between looks at the files of a connection that is in use."""

CALLS_S = 2.0
"""How long calls that began on the old connection may still take."""


class Renewal:
    """Replaces one client's connections after their TLS files have changed. The new one must have been answered before
    the old one is closed: files that do not match (yet), or that etcd refuses, change nothing."""

    def __init__(
        self, open_new: Callable[[str], Connection], swap: Callable[[str, Connection, Connection], bool]
    ) -> None:
        """`swap(endpoint, old, new)` puts `new` in the place of `old`; False: `old` is no longer in use."""
        self._open_new = open_new
        self._swap = swap
        self._due_s = 0.0
        self._busy = threading.Lock()

    def look(self, endpoint: str, connection: Connection) -> None:
        """Called with the connection in use before each call; returns at once."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        if connection.outdated and self._busy.acquire(blocking=False):
            name, work = "etcd-certificates", partial(self._renew, endpoint, connection)
            try:
                start_thread(threading.Thread(target=work, name=name, daemon=True))
            except EtcdUnavailable:  # at the next look
                self._busy.release()

    def _renew(self, endpoint: str, old: Connection) -> None:
        new = unused = None
        try:
            new = unused = self._open_new(endpoint)
            new.probe()
            unused = old if self._swap(endpoint, old, new) else new
            threading.Event().wait(CALLS_S if unused is old else 0)
        except EtcdError:
            pass  # the files may be half written: at the next look
        finally:
            self._busy.release()
            if unused is not None:
                unused.close()
