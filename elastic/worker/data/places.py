"""Where the script takes its batches: at one place of `train`, so that a batch means the same after a failure."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Generator, Iterator
from types import CodeType
from typing import Any, NamedTuple

from elastic.worker.link.misuse import MisuseRuntimeError


class _Place(NamedTuple):
    code: CodeType | None
    span: tuple[int | None, int | None, int | None, int | None]
    """(first line, last line, first column, last column)."""

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename) if self.code else '?'}:{self.span[0]}"


_END: Any = object()
_NOWHERE = _Place(None, (None,) * 4)


def _place(code: CodeType, offset: int) -> _Place:
    """By its span in the source: of one `for` Python 3.12 gives two offsets, that of the instruction and that of its
    cache, and changes between them as it specializes the instruction, and takes that back."""
    return _Place(code, next(itertools.islice(code.co_positions(), offset // 2, None)))


def at_one_place(loop: Generator[Any, None, None]) -> Iterator[Any]:
    """The batches of `loop`. Raises RuntimeError where the script takes one at a place that it has left for another:
    two places in turn, as a `for` and a `next()` in its body. After a failure `train` begins at its first place, and
    the loop at the step that was interrupted, so that the batch of one place would be that of the other."""
    code: CodeType | None = None
    offset, last, left = -1, _NOWHERE, set[_Place]()
    with contextlib.closing(loop):
        while True:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            if caller is not None and (caller.f_lasti != offset or caller.f_code is not code):
                code, offset = caller.f_code, caller.f_lasti
                place = _place(code, offset)
                if place in left and place != last:
                    raise MisuseRuntimeError(
                        f"{place} and {last} take batches of one loop in turn. After a failure train() begins at the "
                        "first of them again, and the loop at the step that was interrupted: the batches would change "
                        "places. Take each batch at one place, and let state.step say what is done with it, as in "
                        "`if state.step % 2`; or take the samples of both as one batch, and commit once"
                    )
                left.add(last)
                last = place
            del frame, caller  # they hold the script's variables
            if (batch := next(loop, _END)) is _END:
                return
            yield batch
