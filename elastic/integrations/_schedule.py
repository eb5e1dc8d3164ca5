"""A learning rate scheduler as part of a State, made when its length is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Schedule:
    """Holds a scheduler that is made on the first entry of `train`, when the global batch and so the number of steps
    is known. Until then it keeps the state that was loaded into it."""

    def __init__(self, made: Any = None) -> None:
        self.made = made
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        held = self.made.state_dict() if self.made is not None else self._loaded
        return {} if held is None else {"held": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        scheduler_state = state.get("held")
        if scheduler_state is None:
            self.made = self._loaded = None  # back to before it was made
        elif self.made is not None:
            self.made.load_state_dict(scheduler_state)
        else:
            self._loaded = scheduler_state

    def make(self, make: Callable[[], Any], optimizer: Any) -> Any:
        """Make the scheduler and bring it to the loaded state. Making one changes the optimizer's learning rates: those
        that belong to a loaded state stay."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        self.made = make()
        if self._loaded is not None:
            self.made.load_state_dict(self._loaded)
            self._loaded = None
            for group, held in zip(optimizer.param_groups, options, strict=True):
                group.update(held)
        return self.made
