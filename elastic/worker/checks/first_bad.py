"""Which layer first gave a value that is not finite, and for which samples: for the incident of a loss that is NaN.

The hooks are there only if the job asks for it (`debug.layers`), or while steps are done again after a loss that was
not finite. They look at the outputs of layers without children, in the order of the forward; what they find stays on
the device until the loss turns out to be bad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elastic.worker.data.batches import Batch
from elastic.worker.torch_internals.torch_private import pytree

MOST_IDS = 16
MOST_LAYERS = 10_000
"""Calls of layers that are remembered in one step."""


class FirstBad:
    """`watch` sets the hooks, `off` removes them. `begin` forgets the step before."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._found: list[tuple[str, torch.Tensor]] = []
        """Layer, and for each position of its output's first dimension whether all of it is finite."""

    @property
    def on(self) -> bool:
        return bool(self._handles)

    def watch(self, modules: Sequence[nn.Module]) -> None:
        self.off()
        for number, module in enumerate(modules):
            front = f"{number}." if len(modules) > 1 else ""
            for name, layer in module.named_modules():
                if not any(layer.children()) and not isinstance(layer, torch.jit.ScriptModule):  # has no hooks
                    called = f"{front}{name}".rstrip(".") or type(layer).__name__
                    self._handles.append(layer.register_forward_hook(self._hook(f"{called} ({type(layer).__name__})")))

    def off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._found = [], []

    def begin(self) -> None:
        self._found.clear()

    def _hook(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return  # an evaluation
            for leaf in pytree.tree_leaves(output):
                if _has_numbers(leaf) and len(self._found) < MOST_LAYERS:
                    self._found.append((layer, _finite_rows(leaf)))

        return look

    def description(self, batch: Batch | None) -> str:
        """What is known of the step, in words; waits for a GPU. '' if nothing is."""
        ids = list(batch.indices) if batch is not None else []
        lines = []
        if layer := self._first():
            name, places = layer
            hit = [ids[at] for at in places if at < len(ids)] if ids else []
            lines.append(f"first in layer {name}" + (f", for {_samples(hit)}" if hit else ""))
        elif self.on:
            lines.append(
                "the outputs of all layers without inner ones are finite: look at what follows them, and at the loss"
            )
        if batch is not None and (inputs := _bad_inputs(batch)):
            lines.append(f"the data of {_samples(inputs)} are not finite themselves")
        elif ids and not lines:
            lines.append(f"this rank had {_samples(ids)}")
        return "; ".join(lines)

    def _first(self) -> tuple[str, list[int]] | None:
        """The first layer with such a value, and the samples by their place in the batch, over its micro-batches."""
        first = next((name for name, finite in self._found if not bool(finite.all())), None)
        if first is None:
            return None
        places, offset = [], 0
        for name, finite in self._found:
            if name == first:
                places += [offset + at for at, good in enumerate(finite.tolist()) if not good]
                offset += len(finite)
        return first, places


def _bad_inputs(batch: Batch) -> list[int]:
    bad: set[int] = set()
    for leaf in pytree.tree_leaves(batch.data):
        if _has_numbers(leaf) and leaf.ndim and len(leaf) == len(batch.indices):
            bad |= {at for at, fine in enumerate(_finite_rows(leaf).tolist()) if not fine}
    return [batch.indices[at] for at in sorted(bad)]


def _finite_rows(leaf: torch.Tensor) -> torch.Tensor:
    """For each position of its first dimension whether all of it is finite."""
    finite = torch.isfinite(leaf.detach())
    return finite.flatten(1).all(1) if finite.ndim > 1 else finite.reshape(-1)


def _has_numbers(leaf: Any) -> bool:
    """Whether it is a dense tensor of floating-point numbers, in types that torch computes with (not float8)."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return False
    return leaf.is_floating_point() and leaf.element_size() > 1


def _samples(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:MOST_IDS]))
    more = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return f"sample{'s' if len(ids) != 1 else ''} {shown}{more}"
