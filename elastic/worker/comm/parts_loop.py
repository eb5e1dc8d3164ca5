"""What a step knows of its loop over the micro-batches of a batch, and why such a loop is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import nn


class UnsyncedGradients:
    """Whether a model's gradients have what only this rank has computed: a backward that no exchange has followed, as
    of the module itself in place of its wrapper, or in `no_sync`."""

    held = False
    trained = False
    """The wrapper has had a forward with gradients in the newest loop over parts."""
    begins: Callable[[nn.Module], None] | None = None
    """Called at a forward with gradients of the wrapper."""
    waits = False
    """An exchange was begun, by such a forward outside `no_sync`, and its backward has not filled all buckets."""
    applied = False
    """An optimizer has stepped meanwhile. The ranks' parameters are then alike only if the script has seen to it."""

    def exchanged(self, then: Callable[[], None]) -> Callable[[], None]:
        """To be called when all gradients of a backward are in buckets; calls `then`."""

        def contributed() -> None:
            self.held = self.waits = False
            then()

        return contributed


HELD = (
    "a second loop over batch.parts() in one step, or gradients that an earlier backward has left: the loop would "
    "weight them again. Put all losses of a step into one loop, with the whole batch's after it, and drop "
    "gradients that are done with before it: optimizer.zero_grad()"
)

USED = (
    "batch.parts() of a batch that was not taken in this step: it has the weight of its own step, and a replacement "
    "has no batch of an earlier one. Train on the batch of this step, before job.commit(); to replay samples keep "
    "their indices in the State, and read them again in dataset[i]"
)

LEFT = (
    "the loop over batch.parts() was left before its end: its gradients are not the batch's mean. Run it to its end; "
    "in zip() it comes first: zip(batch.parts(), masks)"
)

UNEXCHANGED = (
    "no backward has run in the last part of batch.parts(), which exchanges the gradients of all: each rank has its "
    "own. Run one there for each model; one to leave out counts as (0 * loss).backward()"
)

TWICE = (
    "a second backward in the last part of batch.parts(): it would exchange the first one's sums again, with the "
    "weight of a part. Add up the losses of a part: (a + b).backward()"
)


def two_loops(weights: Sequence[float]) -> str:
    """Why two loops over batches, of these weights, are refused in one step."""
    shares = " and ".join(f"{weight:.4g}" for weight in weights)
    return (
        f"two loops over batches in one step, of which this rank has {shares} of the samples: one weight cannot give "
        "the mean of both. Read both in one dataset, dataset[i] == (a, b), or give job.weighted the sum and the number "
        "of each loss's terms. If one is only to look at, take it before the loop, not within: "
        "batches = job.batches(…); probe = next(batches); batches.close()"
    )


def samples(batch: object) -> tuple[Any, Any]:
    """(step, indices) of a batch, the same for a copy with other data."""
    return getattr(batch, "step", None), getattr(batch, "indices", None)


def gradients(models: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [p.grad for model in models for p in model.parameters() if p.grad is not None]


class PartsLoop:
    """A loop over the micro-batches of a batch. Models are named by their identities."""

    def __init__(self, batch: float, had: Set[int]) -> None:
        self.batch = batch
        """The share of the whole batch, or of a newer one: the weight after the loop."""
        self.last = False
        """It stands in its last micro-batch, whose backward exchanges the gradients."""
        self.had = had
        """Models with gradients of before the loop: whether it has added to them is not known."""
        self.exchanged: set[int] = set()
        """Models whose backward has run in the last micro-batch."""
        self.twice: set[int] = set()
        """Those with a second one there, while no optimizer had stepped."""
        self.dropped: set[int] = set()
        """Those of them whose sums were dropped there, as those that a GradScaler has not applied: a further backward
        exchanges none of them again."""
        self.applied: set[int] = set()
        """Those of them after which an optimizer has stepped there: what a further backward adds to their gradients is
        dropped later, as a GAN's."""
        self.open = True
        """Its generator may go on."""

    def summed(self) -> set[int]:
        """Models of which a further backward would exchange sums again."""
        return self.exchanged - self.applied - self.dropped if self.last else set()

    def begins(self, model: nn.Module) -> None:
        """A forward of `model` with gradients: what the script has dropped is not exchanged again."""
        if id(model) in self.summed() and not any(bool(grad.any()) for grad in gradients([model])):
            self.dropped.add(id(model))
