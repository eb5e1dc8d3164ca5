"""Values that the script logs (`job.log`): one row per committed step, passed on by rank 0 alone.

Every rank keeps its newest rows. If rank 0 is lost, its replacement receives those of another rank with the state and
passes on what its predecessor may not have written any more; the reader skips the steps that it has. Rows of steps that
were committed and lost are dropped when training goes back, so the steps that are done again are not counted twice.
"""

from __future__ import annotations

import math
import numbers
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic.contract.worker.messages import LoggedRow
from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

KEPT_ROWS = 1000
MOST_NAMES = 64
MOST_NAME_CHARS = 100
CHUNK_BYTES = 64 * 1024
"""Of the rows in one message, roughly."""

Send = Callable[[int, Sequence[LoggedRow], bool], None]
"""Called with the step at which this generation has begun, rows, and whether they are repeated."""


class _Value:
    """A number, or a tensor on a GPU whose copy is under way: nothing waits for it."""

    def __init__(self, value: Any) -> None:
        self._event: Any = None
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value = value.detach()
            self._copy = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._copy.copy_(value.reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._number = float(value.detach() if isinstance(value, torch.Tensor) else value)

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get(self) -> float:
        """Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._number, self._event = float(self._copy), None
        return self._number


class LossReader:
    """The loss as a float, without waiting for a GPU: there, the value of an earlier step."""

    def __init__(self) -> None:
        self._copying: _Value | None = None

    def read(self, loss: torch.Tensor | float | None) -> float | None:
        if not isinstance(loss, torch.Tensor):
            return None if loss is None else float(loss)
        if not loss.is_cuda:
            return float(loss.item())
        value = None
        if self._copying is not None and self._copying.ready():
            value, self._copying = self._copying.get(), None
        if self._copying is None:
            self._copying = _Value(loss)
        return value


class JobLog:
    """Of one process. `enter` begins a generation, `add` takes values, `committed` ends a step."""

    def __init__(self, send: Send, wall: Callable[[], float] = time.time) -> None:
        self._send, self._wall = send, wall
        self._first = False
        self._begun = 0
        self._values: dict[str, _Value] = {}
        """Of the step under way."""
        self._copying: deque[tuple[int, float, dict[str, _Value]]] = deque()
        """Committed steps, some of whose values are still on the device; oldest first."""
        self._rows: deque[LoggedRow] = deque(maxlen=KEPT_ROWS)

    def kept(self) -> list[LoggedRow]:
        """Between two generations: the newest rows."""
        self._first = False
        self._pass_on(wait=True)
        return list(self._rows)

    def receive(self, rows: Sequence[LoggedRow]) -> None:
        """Between two generations: keep those of another rank for the steps of which this one has none."""
        if rows:
            known = {row.step: row for row in rows} | {row.step: row for row in self._rows}
            self._rows = deque((known[step] for step in sorted(known)), KEPT_ROWS)

    def enter(self, begun: int, *, first: bool) -> None:
        """A generation begins with `begun` steps committed; `first`: as rank 0."""
        self._values.clear()
        self._begun, self._first = begun, first
        self._rows = deque((row for row in self._rows if row.step <= begun), KEPT_ROWS)
        self._copying = deque(each for each in self._copying if each[0] <= begun)
        if first and self._rows:
            for rows in chunks(list(self._rows)):
                self._send(begun, rows, True)

    def add(self, values: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError for what is no number, or too much."""
        for name, value in values.items():
            if not name or len(name) > MOST_NAME_CHARS or not name.isprintable():
                raise MisuseValueError(
                    f"job.log: {name[:40]!r}: a name has 1 to {MOST_NAME_CHARS} printable characters"
                )
            if name not in self._values and len(self._values) >= MOST_NAMES:
                raise MisuseValueError(f"job.log: more than {MOST_NAMES} names in one step: {name!r} is one too many")
            if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.Tensor):
                raise MisuseTypeError(
                    f"job.log: {name} is {type(value).__name__}: a number, or a tensor of one element"
                )
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise MisuseTypeError(
                    f"job.log: {name} has {value.numel()} elements: log its mean, or one name for each"
                )
            self._values[name] = _Value(value)

    def committed(self, step: int) -> None:
        if self._values:
            self._copying.append((step, self._wall(), self._values))
            self._values = {}
        if self._copying:
            self._pass_on(wait=False)

    def finish(self, step: int) -> None:
        """Training is complete: values that were logged after the last commit belong to it."""
        self.committed(step)
        self._pass_on(wait=True)

    def _pass_on(self, *, wait: bool) -> None:
        while self._copying and (wait or all(value.ready() for value in self._copying[0][2].values())):
            step, wall_s, values = self._copying.popleft()
            row = LoggedRow(step=step, wall_s=wall_s, values={name: value.get() for name, value in values.items()})
            self._rows.append(row)
            if self._first:
                self._send(self._begun, [row], False)


def chunks(rows: Sequence[LoggedRow]) -> list[list[LoggedRow]]:
    """`rows` in lists that each fit into one message."""
    lists: list[list[LoggedRow]] = []
    size = math.inf
    for row in rows:
        nbytes = 64 + sum(4 * len(name) + 32 for name in row.values)
        if size + nbytes > CHUNK_BYTES:
            lists.append([])
            size = 0
        lists[-1].append(row)
        size += nbytes
    return lists
