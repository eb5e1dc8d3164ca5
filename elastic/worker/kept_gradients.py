"""Gradients that are kept over commits, for an optimizer's step of a later turn: a failure loses them, so they are
named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

LOOKS = 8
"""Commits without an optimizer's step that are looked at, if nothing is found. A loop that accumulates over commits is
found at its first ones; one that skips a step now and then, as a GradScaler does, pays for no more."""


class KeptGradients:
    """Finds a backward that adds to the gradients of a committed step. To find gradients after a commit does not tell
    it: most loops drop them at the top of the next turn, or right before the backward."""

    def __init__(self) -> None:
        self._looks = LOOKS
        self._hooks: list[Any] = []
        self._kept = self._told = False
        self._since = 0
        """The first committed step whose gradients no optimizer has applied; 0: none."""

    def committed(self, modules: Iterable[torch.nn.Module], step: int, *, applied: bool) -> str:
        """`step` is committed; `applied`: by an optimizer. Returns a warning, once, and '' otherwise."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if applied:
            self._since = 0
        else:
            self._since = self._since or step
            if self._looks and not self._kept:
                self._looks -= 1
                self._watch(modules)
        if not self._kept or self._told:
            return ""
        self._told = True
        return (
            "gradients are kept over job.commit(): steps are committed whose gradients no optimizer has applied yet. A "
            "failure loses these gradients, and the weights are then not those of an undisturbed run. Take the samples "
            "of one optimizer's step as one batch: job.batches(…, micro_batch=…) and batch.parts()"
        )

    def entered(self, step: int) -> str:
        """`train` is entered at `step`, without gradients. Returns what was lost, and '' if nothing is known to be."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        first, self._since = self._since, 0
        if not self._kept or not first or step < first:
            return ""
        return (
            f"the gradients of steps {first} to {step}, kept over job.commit() for a later optimizer's step, are lost: "
            "that step will lack their samples"
        )

    def _watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Look at one parameter of each module when its next gradient is there, before it is added."""
        for module in modules:
            parameter = next((p for p in module.parameters() if p.grad is not None and p.requires_grad), None)
            if parameter is not None:
                self._hooks.append(parameter.register_hook(self._look(parameter)))  # type: ignore[no-untyped-call]

    def _look(self, parameter: torch.nn.Parameter) -> Any:
        first = True

        def look(_: torch.Tensor) -> None:
            nonlocal first
            if first and parameter.grad is not None and bool(parameter.grad.any()):
                self._kept = True
            first = False  # a further backward of this turn adds to the gradients of this turn

        look.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save(module) warns of hooks
        return look
