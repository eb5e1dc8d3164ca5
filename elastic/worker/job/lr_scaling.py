"""`Job.lr_scale`: learning rates for a batch that grows with the world size, without a trace in the state.

A factor that were multiplied into `param_groups` would be saved, sent to replacements and multiplied again after the
next failure, and schedulers that compute a rate from the one before would carry it on. So the rates of the state stay
those of the base world size, and the factor is applied for the duration of each optimizer step only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch

from elastic.worker.link.misuse import MisuseValueError

Mode = Literal["none", "linear", "sqrt"]


def factor(mode: Mode, world_size: int, base_world_size: int) -> float:
    """By how much rates that were tuned for `base_world_size` ranks are to be multiplied. A function of its arguments
    only, so it is the same after any number of recoveries. Raises ValueError."""
    if isinstance(base_world_size, bool) or not isinstance(base_world_size, int) or base_world_size < 1:
        raise MisuseValueError(
            f"job.lr_scale: base_world_size = {base_world_size!r}: the number of ranks for which the learning rate was "
            "chosen, at least 1"
        )
    match mode:
        case "none":
            return 1.0
        case "linear":
            return world_size / base_world_size
        case "sqrt":
            return math.sqrt(world_size / base_world_size)
    raise MisuseValueError(f"job.lr_scale: mode = {mode!r}: 'none', 'linear' or 'sqrt'")


class ScaledSteps:
    """The optimizers whose steps use scaled rates in this generation."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._kept: dict[int, list[Any]] = {}
        """Rates of the state by optimizer, during its step."""

    def scale(self, optimizers: Iterable[torch.optim.Optimizer], by: float) -> None:
        """Scale the rates of these optimizers from now on, and of no others."""
        self.clear()
        for optimizer in dict.fromkeys(optimizers):  # each once, however often it is named
            self._handles.append(optimizer.register_step_pre_hook(functools.partial(self._before, by)))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def clear(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._kept.clear()

    def _before(self, by: float, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A step that raised has left its rates scaled: the rates kept before that step are the right ones.
        rates = self._kept.setdefault(id(optimizer), [group["lr"] for group in optimizer.param_groups])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * by

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._kept.pop(id(optimizer)), strict=True):
            group["lr"] = rate
