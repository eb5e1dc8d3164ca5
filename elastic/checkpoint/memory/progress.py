"""Progress reports of a long copy. No torch here: the writer process uses it too."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]
"""Called with the bytes that have arrived since the last call, by the thread that waits for all of them."""


def unreported(nbytes: int) -> None:
    """For a copy whose progress is not reported."""
