"""What an interrupted step has left behind in the objects of the script, dropped before `train` is entered again.

A GradScaler keeps, for the rest of a step, which optimizers it has unscaled, and gives its scale to an optimizer that
divides by it in its own step. An exception out of that step leaves both: the step that is done again would apply its
gradients undivided, or divide them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import torch_private
from .optimizer_marks import with_inner
from .parts import Part

DEPTH = 4
"""Levels of attributes and containers at which a part may have a scaler."""

_NO_HOLDERS = (torch.Tensor, torch.optim.Optimizer, str, bytes, int, float, type(None))


def forget(parts: Mapping[str, Part]) -> None:
    """Drop the gradients, as the next backward would add to them, and what a GradScaler has marked.

    A scaler that is no part of the state begins with its initial scale again, as it does on a replacement: gradients
    that the ranks have scaled by different factors have no mean.
    """
    for part in parts.values():
        if isinstance(part.value, torch.nn.Module):
            part.value.zero_grad(set_to_none=True)
        # As timm's NativeScaler has a scaler. One that a script has frozen (gc.freeze) is not found below.
        held = [part.value, *getattr(part.value, "__dict__", {}).values()]
        torch_private.forget_unscaled(*held)
        for each in held:
            if isinstance(each, torch.optim.Optimizer):
                for optimizer in with_inner(each):
                    _forget_optimizer(optimizer)
    for scaler in torch_private.used_scalers():
        torch_private.forget_unscaled(scaler)
        if not any(_holds(part.value, scaler, DEPTH) for part in parts.values() if part.kind != "value"):
            torch_private.begin_anew(scaler)


def _forget_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:  # not its zero_grad(), which need not take an argument
        for param in group["params"]:
            param.grad = None
    for name in ("grad_scale", "found_inf"):  # GradScaler.step sets them, and deletes them after the optimizer's step
        vars(optimizer).pop(name, None)


def _holds(value: Any, scaler: object, depth: int) -> bool:
    if value is scaler:
        return True
    if not depth or isinstance(value, _NO_HOLDERS):
        return False
    inner: Iterable[Any]
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        inner = getattr(value, "__dict__", {}).values()
    return any(_holds(item, scaler, depth - 1) for item in inner)
