"""The futures that a backward, or an exchange of buffers, waits on, so that an abort can fail them.

Gloo has no abort. Shutting down its sockets ends nearly all of its collectives, but not all: gloo keeps a send that it
could not write when the connection broke, without an error, and the thread that waits for it wakes up only at the
group's timeout (about one abort in fifty). DDP's backward does not wait for gloo's threads but on the future that the
communication hook returned, and `buffers` waits on one too. Such a future is failed here, the wait raises, and the
worker keeps its process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .errors import GroupAborted

Result = Callable[[torch.futures.Future[Any]], torch.Tensor]


class _Pending:
    """One future of gloo's, and the one that the main thread waits on in its place."""

    def __init__(self, result: Result, on_failed: Callable[[], None]) -> None:
        self._result, self._on_failed = result, on_failed
        self._settled: torch.futures.Future[Any] = torch.futures.Future()
        """Its value is gloo's future, or the reason of the abort."""
        self.future: torch.futures.Future[torch.Tensor] = self._settled.then(self._deliver)

    def settle(self, outcome: torch.futures.Future[Any] | str) -> None:
        self._settled.set_result(outcome)

    def _deliver(self, settled: torch.futures.Future[Any]) -> torch.Tensor:
        outcome = settled.value()
        if isinstance(outcome, str):
            self._on_failed()
            raise GroupAborted(f"the process group has been aborted: {outcome}")
        return self._result(outcome)


class InFlight:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: set[_Pending] = set()

    def follow(
        self, theirs: torch.futures.Future[Any], result: Result, on_failed: Callable[[], None]
    ) -> torch.futures.Future[torch.Tensor]:
        """A future with `result(theirs)` once `theirs` is done, or with GroupAborted once `fail` was called; before
        that `on_failed` is called."""
        pending = _Pending(result, on_failed)
        with self._changed:
            self._pending.add(pending)
        theirs.add_done_callback(lambda done: self._settle(pending, done))
        return pending.future

    def fail(self, why: str) -> bool:
        """Fail all futures that are not done. Returns whether there were any."""
        with self._changed:
            failed, self._pending = self._pending, set()
            self._changed.notify_all()
        for pending in failed:
            pending.settle(why)
        return bool(failed)

    def wait(self, limit_s: float | None) -> bool:
        """Wait until all are done, or were failed. Returns False after `limit_s` seconds; None: no limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, limit_s)

    def _settle(self, pending: _Pending, done: torch.futures.Future[Any]) -> None:
        with self._changed:
            if pending not in self._pending:
                return
            self._pending.remove(pending)
            self._changed.notify_all()
        pending.settle(done)


IN_FLIGHT = InFlight()
"""The all-reduces of this process's gradients and the broadcasts of its buffers."""
