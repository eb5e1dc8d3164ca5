"""Gradients that are kept over commits, for an optimizer's step of a later turn: a failure loses them, so they are
named."""

from __future__ import annotations

from typing import Any

import torch

from elastic.worker.state.state import State

LOOKS = 8
"""Commits without an optimizer's step that are looked at, if nothing is found. A loop that accumulates over commits is
found at its first ones; one that skips a step now and then, as a GradScaler does, pays for no more."""


class KeptGradients:
    """Finds an optimizer that applies gradients of committed steps. To find gradients after a commit does not tell it:
    most loops drop them at the top of the next turn, or right before the backward. Nor does a backward that adds to
    them: that of a GAN's generator does so for its discriminator, whose gradients are dropped only then."""

    def __init__(self) -> None:
        self._looks = LOOKS
        self._hooks: list[Any] = []
        self._added_to: dict[int, torch.nn.Parameter] = {}
        """By identity: parameters with gradients of a committed step that a backward has added to since."""
        self._kept = self._told = False
        self._since = 0
        """The first committed step whose gradients no optimizer has applied; 0: none."""

    def committed(self, state: State, step: int, *, applied: bool) -> str:
        """`step` is committed; `applied`: by an optimizer. Returns a warning, once, and '' otherwise."""
        self._stop()
        self._since = 0 if applied else self._since or step
        if not self._kept:
            self._next(state, applied)
        if not self._kept or self._told:
            return ""
        self._told = True
        return (
            "gradients are kept over job.commit(): steps are committed whose gradients an optimizer applies in a later "
            "one. A failure loses these gradients, and the weights are then not those of an undisturbed run. Take the "
            "samples of one optimizer's step as one batch: job.batches(…, micro_batch=…) and batch.parts()"
        )

    def entered(self, step: int) -> str:
        """`train` is entered at `step`, without gradients. Returns what was lost, and '' if nothing is known to be."""
        self._stop()
        self._added_to.clear()
        first, self._since = self._since, 0
        if not self._kept or not first or step < first:
            return ""
        return (
            f"the gradients of steps {first} to {step}, kept over job.commit() for a later optimizer's step, are lost: "
            "that step will lack their samples"
        )

    def _next(self, state: State, applied: bool) -> None:
        """Watch the next turn, if there is something to find in it."""
        if self._added_to and not applied:
            pass  # gradients that gather until an optimizer applies them: found only then
        elif self._looks and (self._added_to or not applied):
            self._looks -= 1
        else:
            self._added_to.clear()
            return
        watched = dict(self._added_to)
        for module in state.modules():
            parameter = next((p for p in module.parameters() if p.grad is not None and p.requires_grad), None)
            if parameter is not None:
                watched[id(parameter)] = parameter
        # The gradient of one parameter of each module is looked at when its next one is there, before it is added.
        self._hooks += [p.register_hook(self._look(p)) for p in watched.values()]  # type: ignore[no-untyped-call]
        # Not before the step: a closure may drop the gradients.
        self._hooks += [optimizer.register_step_post_hook(self._stepped) for optimizer in state.optimizers()]

    def _look(self, parameter: torch.nn.Parameter) -> Any:
        first = True

        def look(_: torch.Tensor) -> None:
            nonlocal first
            # A further backward of this turn adds to the gradients of this turn, but may find that they were dropped.
            if first or id(parameter) in self._added_to:
                self._added_to.pop(id(parameter), None)
                if _has_gradient(parameter):
                    self._added_to[id(parameter)] = parameter
            first = False

        look.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save(module) warns of hooks
        return look

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._added_to:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if self._added_to.pop(id(parameter), None) is not None and _has_gradient(parameter):
                    self._kept = True

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())
