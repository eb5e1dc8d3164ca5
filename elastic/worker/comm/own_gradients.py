"""What of a model's gradients is of this rank alone."""

from __future__ import annotations

from collections.abc import Callable


class OwnGradients:
    """Whether a model's gradients have what only this rank has computed: a backward that no exchange has followed, as
    of the module itself in place of its wrapper, or in `no_sync`."""

    held = False
    applied = False
    """An optimizer has stepped meanwhile. The ranks' parameters are then alike only if the script has seen to it."""

    def exchanged(self, then: Callable[[], None]) -> Callable[[], None]:
        """To be called when all gradients of a backward are in buckets; calls `then`."""

        def contributed() -> None:
            self.held = False
            then()

        return contributed


class PartsLoop:
    """A loop over the micro-batches of a batch: each but the last leaves gradients of this rank alone."""

    def __init__(self, batch: float) -> None:
        self.batch = batch
        """The share of the whole batch, or of a newer one: the weight after the loop."""
        self.last = False
        """It stands in its last micro-batch, whose backward exchanges the gradients."""
        self.exchanged = False
        """That backward has run."""
        self.open = True
        """Its generator may go on."""
