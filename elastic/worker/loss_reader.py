"""The loss of a step as a number, for status and the look for NaN."""

from __future__ import annotations

import torch


class LossReader:
    """The loss as a float, without waiting for a GPU: there, the value of an earlier step."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def read(self, loss: torch.Tensor | float | None) -> float | None:
        if not isinstance(loss, torch.Tensor):
            return None if loss is None else float(loss)
        if not loss.is_cuda:
            return float(loss.item())
        loss, value = loss.detach().reshape(()), None
        if self._event is not None and self._copy is not None and self._event.query():  # type: ignore[no-untyped-call]
            value, self._event = float(self._copy), None
        if self._event is None:
            self._copy = torch.empty((), dtype=loss.dtype, pin_memory=True) if self._copy is None else self._copy
            self._copy.copy_(loss, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        return value
