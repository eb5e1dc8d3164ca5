"""Norms of gradients and weights in one step, per parameter, on request or every so many steps.

A sample reads tensors and changes none; nothing is exchanged with other ranks, and while none is due a step pays for
one comparison. This rank's own gradients are read in DDP's hook, before they are summed; the mean over the ranks before
the optimizer's step, and the weights at the commit. A step that is not committed leaves no sample. Of gradients of a
loss that a GradScaler has scaled, the norms are divided by its factor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from elastic.contract.worker.messages import GradientRow, GradientSample
from elastic.worker.state.state import State
from elastic.worker.torch_internals import torch_private

ROWS = 300
"""Parameters in one message."""


Send = Callable[[GradientSample], None]
Numbers = tuple[torch.Tensor, torch.Tensor]
"""Norm and sum, on the device: nothing waits for them before the commit."""


class GradientSampler:
    def __init__(self, every_steps: int, send: Send) -> None:
        """`every_steps`: 0: on request only."""
        self._every = every_steps
        self._send = send
        self.asked_at = 0
        """Step that was requested, or the next one after it; 0: none. Set by another thread."""
        self.on = False
        """The step under way is sampled."""
        self._own: dict[int, Numbers] = {}
        self._mean: dict[int, Numbers] = {}
        """By identity of the parameter."""
        self._divided: set[int] = set()
        """Parameters whose own gradient's numbers are divided already."""

    def begin(self, step: int) -> None:
        """The step after `step` committed ones begins."""
        due = (self._every and (step + 1) % self._every == 0) or (self.asked_at and step + 1 >= self.asked_at)
        self.on = bool(due)
        if due or self._own or self._mean:
            self._own, self._mean, self._divided = {}, {}, set()

    def own(self, bucket: Any) -> None:
        """Called by the communication hook with gradients of this rank alone."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._own[id(parameter)] = _numbers(gradient)

    def applied(self, state: State) -> None:
        """An optimizer is about to step: the gradients are means over the ranks. GradScaler has unscaled them, unless
        the optimizer divides by the factor itself."""
        optimizers = state.optimizers()
        scaled = _by_parameter(torch_private.scales(optimizers, torch_private.scalers()))
        for key in self._own.keys() & (scaled.keys() - self._divided):
            self._own[key] = _divided(self._own[key], scaled[key])
            self._divided.add(key)
        theirs = {each: getattr(each, "grad_scale", None) for each in optimizers}
        left = _by_parameter({each: factor for each, factor in theirs.items() if isinstance(factor, torch.Tensor)})
        for _, parameter in _parameters(state):
            if parameter.grad is not None:
                self._mean[id(parameter)] = _divided(_numbers(parameter.grad), left.get(id(parameter)))

    def committed(self, state: State, *, generation: int, step: int, rank: int, empty: bool) -> None:
        """`empty`: this rank had no samples in the step; its own gradients mean nothing then."""
        if self.asked_at and step >= self.asked_at:
            self.asked_at = 0
        parameters = list(_parameters(state))
        weights = [_numbers(parameter) for _, parameter in parameters]
        zero = torch.zeros(())
        flat = [
            number
            for (_, parameter), weight in zip(parameters, weights, strict=True)
            for pair in (self._own.get(id(parameter)), self._mean.get(id(parameter)), weight)
            for number in (pair or (zero, zero))
        ]
        values = _values(flat)
        rows, own, after = [], xxhash.xxh3_64(), xxhash.xxh3_64()
        for at, (name, parameter) in enumerate(parameters):
            numbers = values[6 * at : 6 * at + 6]
            has_own, has_mean = id(parameter) in self._own and not empty, id(parameter) in self._mean
            own.update(struct.pack("<2d", *(numbers[0:2] if has_own else numbers[2:4])))
            after.update(struct.pack("<2d", *numbers[4:6]))
            rows.append(
                GradientRow(
                    name,
                    _or_none(numbers[0], has_own),
                    _or_none(numbers[2], has_mean),
                    _or_none(numbers[4], True),
                    parameter.requires_grad,
                    bad=(has_own and not math.isfinite(numbers[0])) or (has_mean and not math.isfinite(numbers[2])),
                )
            )
        differ = any(id(parameter) in self._own for _, parameter in parameters) and not empty
        parts = [tuple(rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)] or [()]
        for number, part in enumerate(parts):
            self._send(
                GradientSample(
                    generation=generation, step=step, rank=rank, part=number, parts=len(parts), rows=part,
                    gradients=own.hexdigest() if differ else "", weights=after.hexdigest(),
                )
            )  # fmt: skip


def _parameters(state: State) -> list[tuple[str, nn.Parameter]]:
    """By name; with several modules, the part's number is in front. Shared parameters once."""
    modules = state.modules()
    parameters = []
    for number, module in enumerate(modules):
        front = f"{number}." if len(modules) > 1 else ""
        parameters += [(f"{front}{name}", parameter) for name, parameter in module.named_parameters()]
    return parameters


def _numbers(tensor: torch.Tensor) -> Numbers:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.element_size() == 1:  # of float8 torch computes no norm
        tensor = tensor.float()
    if tensor.numel() == 0:
        return torch.zeros((), device=tensor.device), torch.zeros((), device=tensor.device)
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype is not torch.float64 else None)
    return norm, tensor.sum(dtype=torch.float32)


def _by_parameter(factors: Mapping[torch.optim.Optimizer, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Identity of a parameter -> the factor of its optimizer."""
    pairs = ((group, factor) for optimizer, factor in factors.items() for group in optimizer.param_groups)
    return {id(parameter): factor for group, factor in pairs for parameter in group["params"]}


def _divided(numbers: Numbers, factor: torch.Tensor | None) -> Numbers:
    if factor is None:
        return numbers
    norm, total = (number / factor.to(number.device) for number in numbers)
    return norm, total


def _values(numbers: list[torch.Tensor]) -> list[float]:
    """One copy from each device."""
    values: list[float] = [0.0] * len(numbers)
    by_device: dict[torch.device, list[int]] = {}
    for at, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(at)
    for places in by_device.values():
        column = torch.stack([numbers[at].to(torch.float64) for at in places]).tolist()
        for at, value in zip(places, column, strict=True):
            values[at] = value
    return values


def _or_none(value: float, there: bool) -> float | None:
    return value if there and math.isfinite(value) else None
