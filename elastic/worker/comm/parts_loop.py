"""What a step knows of its loop over the micro-batches of a batch, and why such a loop is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ModelGradients:
    """What is known of the gradients of one model of `job.ddp`."""

    own = False
    """They have what only this rank has computed: a backward that no exchange has followed, as of the module itself in
    place of its wrapper, or in `no_sync`."""
    waits = False
    """An exchange was begun, by a forward with gradients outside `no_sync`, and its backward has not filled all
    buckets."""
    applied = False
    """An optimizer has stepped while they were this rank's own: the ranks' parameters are then alike only if the script
    has seen to it."""

    had = False
    """As of here, of the newest loop over parts. There were gradients before it: whether it has added to them is not
    known."""
    trained = False
    """The wrapper has had a forward with gradients."""
    exchanged = False
    """A backward has run in the last micro-batch."""
    done = False
    """The sums of that one were applied there, or dropped, as those that a GradScaler has not applied: what a further
    backward adds is dropped later, as a GAN's, or exchanges none of them again."""
    twice = False
    """A second backward has run there before they were done with."""

    @property
    def lacks_exchange(self) -> bool:
        """Gradients that the wrapper has added in this loop have had no exchange."""
        return self.trained and not self.exchanged and not self.had

    def enter_parts(self, *, had: bool) -> None:
        """A loop over parts begins."""
        self.had, self.trained, self.exchanged, self.done, self.twice = had, False, False, False, False


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
    """A loop over the micro-batches of a batch."""

    def __init__(self, batch: float) -> None:
        self.batch = batch
        """The share of the whole batch, or of a newer one: the weight after the loop."""
        self.last = False
        """It stands in its last micro-batch, whose backward exchanges the gradients."""
        self.applied = False
        """An optimizer has stepped there after an exchange."""
        self.open = True
        """Its generator may go on."""
