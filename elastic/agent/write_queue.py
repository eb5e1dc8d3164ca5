"""Writes to etcd on behalf of the loop, in a separate thread, retried until they are done or superseded; one that etcd
will never do is given up.

Each write has a key; a newer write with the same key replaces it. The loop never waits for etcd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import structlog

from elastic.checkpoint.format.errors import CheckpointError
from elastic.contract.records.job_records import ProtocolVersionMismatch
from elastic.etcd.client import EtcdError
from elastic.etcd.types import EtcdRefused

RETRY_S = 0.2

log = structlog.get_logger()

Write = Callable[[], None]
"""Raises EtcdError when it could not be done now, or one of FAILURES."""

FAILURES = (
    OSError, CheckpointError,  # of the checkpoint directory that it reads, or of a socket
    RuntimeError,  # of torch's store; or no thread can be started
    MemoryError,  # a node that is full for a moment
    ValueError, TypeError, OverflowError,  # of a record that cannot be read or written
    msgspec.MsgspecError, ProtocolVersionMismatch,
)  # fmt: skip
"""The write has failed as well, and the agent keeps running. Any other exception is a bug, and ends the agent."""


class WriteQueue:
    """Runs writes one after another."""

    def __init__(self, name: str) -> None:
        self._orders: dict[str, tuple[Write, bool]] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"elastic-etcd-writes-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, key: str, order: Write, *, persist: bool) -> None:
        """`persist`: retry until it is done; otherwise try once (the write reports its own failure)."""
        with self._changed:
            self._orders[key] = (order, persist)
            self._changed.notify()

    def close(self, wait_s: float) -> None:
        """Stop after the pending writes, or after `wait_s` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._orders and not self._stopping:
                    self._changed.wait()
                if self._stopping and not self._orders:
                    return
                batch = tuple(self._orders.items())
            done = [self._try(key, order, persist) for key, (order, persist) in batch]
            if not any(done):
                with self._changed:
                    if self._stopping:
                        return
                    known = set(self._orders)
                    self._changed.wait_for(lambda known=known: self._stopping or set(self._orders) - known, RETRY_S)  # type: ignore[misc]

    def _try(self, key: str, order: Write, persist: bool) -> bool:
        """Whether the write is finished: done, or failed and not to be retried."""
        try:
            order()
        except EtcdRefused as error:  # too large, say: again and again it would only fill the log and keep etcd busy
            self._failing.discard(key)
            log.error("etcd.order_given_up", order=key, error=str(error))
        except (EtcdError, *FAILURES) as error:  # one failing write must not end the workers of this node
            if key not in self._failing and isinstance(error, EtcdError):
                log.warning("etcd.order_failed", order=key, error=str(error), again=persist)
            elif key not in self._failing:
                log.error("etcd.order_raised", order=key, again=persist, exc_info=True)
            self._failing.add(key)
            if persist:  # also after a missing permission: the next attempt finds it granted
                return False
        else:
            if key in self._failing:
                self._failing.discard(key)
                log.info("etcd.order_done", order=key)
        with self._changed:
            if self._orders.get(key, (None,))[0] is order:
                del self._orders[key]
        return True
