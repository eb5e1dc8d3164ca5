"""Detects that an optimizer's state was changed outside its step, without copying it."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from elastic.worker.state.parts.parts import inner_optimizers

from .watch import versions

WINDOW = 32
"""Number of parameters whose state is compared; with more of them, the next window at each commit. This is paid in each
step, and what changes an optimizer's state by hand changes that of all its parameters."""

Marks = tuple[list[weakref.ref[torch.Tensor]], list[int], list[tuple[tuple[Any, ...], Any]]]
"""(its tensors, their version counters, its plain values by their path)"""


class OptimizerMarks:
    """`take`, and later `changed`: by the tensors' identities and version counters, and by plain values.

    The tensors are not kept: an optimizer that replaces them in its step would need twice the memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers = list(with_inner(optimizer))
        self._marks: list[Marks] = []
        self._windows: list[slice] = []
        self._round = 0

    def take(self) -> int:
        """Record the present state. Returns the number of its tensors."""
        self._round += 1
        self._windows = [_window(len(each.state), self._round) for each in self._optimizers]
        self._marks = self._now()
        return sum(len(refs) for refs, _, _ in self._marks)

    def changed(self) -> bool:
        return any(map(_differ, self._marks, self._now()))

    def _now(self) -> list[Marks]:
        # Of the same entries in both: to read the state of a parameter without one creates an empty one, at the end.
        return [_marks(_part(each.state, part)) for each, part in zip(self._optimizers, self._windows, strict=True)]


def with_inner(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """`optimizer`, and those that it holds."""
    yield optimizer
    for _, inner in inner_optimizers(optimizer):
        yield from with_inner(inner)


def _window(count: int, number: int) -> slice:
    if count <= WINDOW:
        return slice(None)
    start = number % -(-count // WINDOW) * WINDOW
    return slice(start, start + WINDOW)


def _part(held: dict[Any, Any], part: slice) -> dict[Any, Any]:
    return held if part.stop is None else dict(itertools.islice(held.items(), part.start, part.stop))


def _marks(state: dict[Any, Any]) -> Marks:
    tensors: list[torch.Tensor]
    plain: list[tuple[tuple[Any, ...], Any]] = []
    try:  # nearly always nothing but tensors
        tensors = [item for entry in state.values() for item in entry.values()]
        counters = versions(tensors)
    except AttributeError:
        tensors = []
        _walk(state, (), tensors, plain)
        counters = versions(tensors)
    return list(map(weakref.ref, tensors)), counters, plain


def _walk(node: Any, path: tuple[Any, ...], tensors: list[torch.Tensor], plain: list[Any]) -> None:
    """What is zero or empty does not count: an optimizer may create it before it asks for the gradients."""
    if isinstance(node, torch.Tensor):
        tensors.append(node)
    elif isinstance(node, dict):
        for place, (key, item) in enumerate(node.items()):
            _walk(item, (*path, key if isinstance(key, str | int) else place), tensors, plain)
    elif isinstance(node, list | tuple):
        for place, item in enumerate(node):
            _walk(item, (*path, place), tensors, plain)
    elif isinstance(node, bool | int | float | str | bytes) and node:
        plain.append((path, node if node == node else "NaN"))


def _differ(then: Marks, now: Marks) -> bool:
    if then[1:] != now[1:]:
        return True
    # A tensor has one weak reference, while it lives.
    return len(then[0]) != len(now[0]) or not all(map(operator.is_, then[0], now[0]))
