"""What of a model's gradients is of this rank alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class OwnGradients:
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
