"""What an interrupted step has left behind in the objects of the script, dropped before `train` is entered again.

A GradScaler keeps, for the rest of a step, which optimizers it has unscaled, and gives its scale to an optimizer that
divides by it in its own step. An exception out of that step leaves both: the step that is done again would apply its
gradients undivided, or divide them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic.worker.state.parts.parts import Part
from elastic.worker.torch_internals import torch_private

from .optimizer_marks import with_inner


def forget(parts: Mapping[str, Part]) -> None:
    """Drop the gradients, as the next backward would add to them, and what a GradScaler has marked.

    A scaler that no part saves begins with its initial scale again, as it does on a replacement: gradients that the
    ranks have scaled by different factors have no mean.
    """
    for part in parts.values():
        if isinstance(part.value, torch.nn.Module):
            part.value.zero_grad(set_to_none=True)
        for each in (part.value, *getattr(part.value, "__dict__", {}).values()):
            if isinstance(each, torch.optim.Optimizer):
                for optimizer in with_inner(each):
                    _forget_optimizer(optimizer)
    for scaler in filter(torch_private.is_used, torch_private.scalers()):
        torch_private.forget_unscaled(scaler)
        if not _saved(scaler, parts):
            torch_private.begin_anew(scaler)


def _forget_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:  # not its zero_grad(), which need not take an argument
        for param in group["params"]:
            param.grad = None
    torch_private.forget_scale(optimizer)


def _saved(scaler: torch.amp.GradScaler, parts: Mapping[str, Part]) -> bool:
    """Whether a part saves the scale of `scaler`, so that a replacement receives it. What an object can reach says
    nothing: its `state_dict()` may leave out a scaler that is its attribute, or have one that a closure holds. So what
    the parts save is compared with what they save of another scale."""
    if any(part.value is scaler for part in parts.values()):
        return True
    others = [part for part in parts.values() if part.kind in ("module", "object")]
    before = _leaves(others)
    with torch_private.with_another_scale(scaler):
        changed = _leaves(others)
    if len(before) == len(changed) and all(map(_same, before, changed)):
        return False
    # A time or a counter in what is saved differs at each look.
    again = _leaves(others)
    if not len(before) == len(changed) == len(again):
        return True
    return any(_same(a, c) and not _same(a, b) for a, b, c in zip(before, changed, again, strict=True))


def _leaves(parts: Iterable[Part]) -> list[Any]:
    held = [part.held() for part in parts]
    tensors = [tensor for named, _ in held for _, tensor in named]
    return [*torch_private.pytree.tree_leaves([extra for _, extra in held]), *tensors]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or one.numel() != 1 or other.numel() != 1 or bool(one == other)
    return bool(one == other)
