"""Threads of the connection to etcd."""

from __future__ import annotations

import threading

from .types import EtcdUnavailable


def start_thread(thread: threading.Thread) -> None:
    """Start it. Raises EtcdUnavailable at a limit of threads: that passes, and must end no agent and no daemon."""
    try:
        thread.start()
    except RuntimeError as error:
        raise EtcdUnavailable(str(error), maybe_done=False) from None
