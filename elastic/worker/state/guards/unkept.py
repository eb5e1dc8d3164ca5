"""Attributes of an optimizer that change in its steps, and that its `state_dict()` lacks: nothing keeps them.

A replacement would begin with those of `setup`, and the replicas would drift apart unseen, as with a counter or a
generator that decides when a preconditioner is updated.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .watch import versions

KEPT = frozenset({"state", "param_groups", "defaults"})


class UnsavedAttributes:
    """Call `look` at each of the first commits."""

    def __init__(self) -> None:
        self._then: dict[str, object] = {}
        self._said: set[str] = set()

    def look(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> str:
        """What has changed since the last call, as a warning that names part and attribute; '' if nothing has."""
        now = {
            f"{part}.{name}": token
            for part, optimizer in optimizers.items()
            for name, value in vars(optimizer).items()
            if name not in KEPT and (token := _token(value)) is not None
        }
        changed = {name for name, token in now.items() if self._then.get(name, token) != token} - self._said
        self._then = now
        self._said |= changed
        if not changed:
            return ""
        return (
            f"state.{', state.'.join(sorted(changed))} changes in the optimizer's steps and is no part of its "
            "state_dict(): a replacement would begin with another value, and the replicas could drift apart. Keep it "
            "in optimizer.state or in the options of a parameter group"
        )


def _token(value: Any) -> object:
    """Equal as long as `value` is; None for what is not looked at, or has nothing to compare, as `SystemRandom`."""
    # No commit ends for want of a warning.
    with contextlib.suppress(RuntimeError, TypeError):
        return _compared(value)
    return None


def _compared(value: Any) -> object:
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return id(value), *versions([value])
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return None
