"""Where a step's time goes on a GPU: events that are recorded in the stream and polled later. Nothing waits for them.

The host runs ahead of the device, so the marks on the beat page say when the work was queued. Here each mark also
records an event; once the last event of a step has passed, the times between them are added to the page.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

import torch

from elastic.contract.worker.beat import Doing

MOST_STEPS = 8
"""Steps under way on the device; of a host that is further ahead the oldest are not measured."""
MOST_MARKS = 64
"""Marks of one step: a script with many collectives of its own is measured up to there."""

Add = Callable[[Mapping[Doing, float]], None]
"""Called with the seconds of one step by what the device did."""


class DeviceMarks:
    def __init__(self, add: Add, new_event: Callable[[], torch.cuda.Event], capturing: Callable[[], bool]) -> None:
        """`capturing`: whether a graph is captured in the current stream: an event would become part of it, and could
        not be queried any more."""
        self._add, self._new, self._capturing = add, new_event, capturing
        self._free: list[torch.cuda.Event] = []
        self._marks: list[tuple[Doing, torch.cuda.Event]] = []
        """Of the step that is being queued, from the commit before it on."""
        self._steps: deque[list[tuple[Doing, torch.cuda.Event]]] = deque()
        """Queued steps, oldest first; the last mark of each is its commit."""
        self._broken = False

    def enter(self) -> None:
        """A generation begins: steps of the one before are not measured any more."""
        self._steps.clear()
        self._marks, self._broken = [], False
        self.mark(Doing.COMPUTING)

    def mark(self, doing: Doing) -> None:
        """From here on the work that is queued belongs to `doing`."""
        if self._marks and self._marks[-1][0] is doing:
            return
        if len(self._marks) >= MOST_MARKS or self._capturing():
            self._broken = True
            return
        event = self._free.pop() if self._free else self._new()
        event.record()
        self._marks.append((doing, event))

    def committed(self) -> None:
        """A step ends, and the next one begins. Adds the steps that have passed on the device."""
        ended, self._marks, broken, self._broken = self._marks, [], self._broken, False
        self.mark(Doing.COMPUTING)
        if ended and self._marks and not broken:
            self._steps.append([*ended, self._marks[0]])
        if len(self._steps) > MOST_STEPS:
            self._steps.popleft()
        while self._steps and self._steps[0][-1][1].query():  # type: ignore[no-untyped-call]
            self._measure(self._steps.popleft())

    def _measure(self, marks: list[tuple[Doing, torch.cuda.Event]]) -> None:
        spent: dict[Doing, float] = {}
        for (doing, begin), (_, end) in itertools.pairwise(marks):
            spent[doing] = spent.get(doing, 0.0) + begin.elapsed_time(end) / 1000
        self._add(spent)
        self._free += [event for _, event in marks[:-1]]  # the last one begins the next step
