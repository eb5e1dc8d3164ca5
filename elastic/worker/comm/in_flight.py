"""The collectives that a backward, or an exchange of buffers, waits for, so that an abort can end the wait.

Gloo has no abort. Shutting down its sockets ends nearly all of its collectives, but not all: gloo keeps a send that it
could not write when the connection broke, without an error, and the thread that waits for it wakes up only at the
group's timeout (about one abort in fifty). So a backward, and whatever of elastic's own waits for all ranks
(`complete`), waits for gloo a while at a time, and is told here once the collective was given up; or, where DDP itself
waits, on a future that is failed here. The wait raises, and the worker keeps its process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import GroupAborted

SLICE = timedelta(seconds=0.1)
"""How long an abort may go unnoticed where gloo does not end."""

LOOK_S = 0.01

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
        self._works: dict[dist.Work, str] = {}
        """Collectives without such a future, and why they were given up; '': not yet."""

    def add(self, work: dist.Work) -> None:
        """To be followed by `finish`, or `forget`."""
        with self._changed:
            self._works[work] = ""

    def forget(self, work: dist.Work) -> None:
        with self._changed:
            self._works.pop(work, None)

    def finish(self, work: dist.Work) -> None:
        """Wait until `work` is done. Raises what gloo has raised, GroupAborted once `fail` was called."""
        try:
            work.wait(SLICE)
        except RuntimeError:
            while not work.is_completed():
                with self._changed:
                    why = self._works.get(work, "")
                if why:
                    raise GroupAborted(f"the process group has been aborted: {why}") from None
                with contextlib.suppress(RuntimeError):  # the time is over; or gloo's own, which comes again
                    work.wait(SLICE)
            self.forget(work)
            work.wait()
        self.forget(work)

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
        """Give up all collectives that are not done. Returns whether there were any."""
        with self._changed:
            failed, self._pending = self._pending, set()
            stuck = [work for work, given_up in self._works.items() if not given_up and not work.is_completed()]
            self._works.update(dict.fromkeys(stuck, why))
            self._changed.notify_all()
        for pending in failed:
            pending.settle(why)
        return bool(failed or stuck)

    def wait(self) -> None:
        """Wait until all are done, or were given up. Main thread only."""
        with self._changed:
            while self._pending or self._works:
                self._works = {w: why for w, why in self._works.items() if not why and not w.is_completed()}
                self._changed.wait(LOOK_S)

    def _settle(self, pending: _Pending, done: torch.futures.Future[Any]) -> None:
        with self._changed:
            if pending not in self._pending:
                return
            self._pending.remove(pending)
            self._changed.notify_all()
        pending.settle(done)


IN_FLIGHT = InFlight()
"""The all-reduces of this process's gradients, the broadcasts of its buffers, and elastic's own collectives."""


def complete(work: dist.Work | None, device: torch.device) -> None:
    """Wait for a collective of elastic's own, over tensors on `device`, that was begun with `async_op=True`. Raises
    what torch raises, GroupAborted once it was given up."""
    if work is None:  # this rank is not in the group
        return
    if device.type != "cpu":
        work.wait()
        return
    IN_FLIGHT.add(work)
    IN_FLIGHT.finish(work)
