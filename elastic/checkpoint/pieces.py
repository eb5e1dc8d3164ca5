"""Work on the pieces of files in several threads, or in the caller's where none can be started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Piece = TypeVar("Piece")
Done = TypeVar("Done")


def each(work: Callable[[Piece], Done], pieces: Sequence[Piece], threads: int) -> list[Done]:
    """The results of `work` on each of `pieces`, in their order, by up to `threads` threads. At a limit of threads the
    caller's does it all, which is slower; `work` may then be done twice on a piece. Raises what `work` raises."""
    if threads > 1 and len(pieces) > 1:
        with ThreadPoolExecutor(min(threads, len(pieces))) as pool:
            try:
                results = pool.map(work, pieces)
            except RuntimeError:  # no further thread can be started; errors of `work` come with its results
                pool.shutdown(cancel_futures=True)
            else:
                return list(results)
    return [work(piece) for piece in pieces]
