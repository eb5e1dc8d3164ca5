"""Where the script takes its batches: at one place of `train`, so that a batch means the same after a failure."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Generator, Iterator
from types import CodeType
from typing import Any, NamedTuple


class _Place(NamedTuple):
    code: CodeType | None
    instruction: int
    line: int = 0

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename) if self.code else '?'}:{self.line}"


def at_one_place(loop: Generator[Any, None, None]) -> Iterator[Any]:
    """The batches of `loop`. Raises RuntimeError where the script takes one at a place that it has left for another:
    two places in turn, as a `for` and a `next()` in its body. After a failure `train` begins at its first place, and
    the loop at the step that was interrupted, so that the batch of one place would be that of the other."""
    last, left = _Place(None, -1), dict[tuple[CodeType, int], _Place]()
    with contextlib.closing(loop):
        while True:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            if caller is not None and (caller.f_lasti != last.instruction or caller.f_code is not last.code):
                code, instruction = caller.f_code, caller.f_lasti  # the line takes a microsecond
                if (place := left.get((code, instruction))) is not None:
                    raise RuntimeError(
                        f"{place} and {last} take batches of one loop in turn. After a failure train() begins at the "
                        "first of them again, and the loop at the step that was interrupted: the batches would change "
                        "places. Take each batch at one place, and let state.step say what is done with it, as in "
                        "`if state.step % 2`; or take the samples of both as one batch, and commit once"
                    )
                if last.code is not None:
                    left[last.code, last.instruction] = last
                last = _Place(code, instruction, caller.f_lineno or 0)
            del frame, caller  # they hold the script's variables
            if (batch := next(loop, None)) is None:
                return
            yield batch
