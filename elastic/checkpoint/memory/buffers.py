"""The arenas that one rank fills with its snapshots: one copy at a time, concurrent with training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from .arena import Arena
from .progress import Progress, unreported

if TYPE_CHECKING:
    import torch

    from .fill import Fill


class Buffers:
    """Main thread only, except `replace` and `free`. Buffers are named by their index in `arenas`."""

    def __init__(self, *, keep_newest: bool = False) -> None:
        """`keep_newest`: the newest content stays until a newer one is complete, also where the other buffer is being
        written to disk."""
        self._keep_newest = keep_newest
        self.arenas: Sequence[Arena] = ()
        self.busy: set[int] = set()
        """Buffers that are being written to disk, and must not be filled."""
        self.beside_s = 0.0
        """CPU seconds that the last copy took from concurrent work."""
        self._beside = True
        self._copying: tuple[int, Fill] | None = None

    def fits(self, nbytes: int) -> bool:
        """Whether a file of `nbytes` bytes fits into each buffer."""
        return bool(self.arenas) and self.arenas[0].capacity >= nbytes

    def replace(self, arenas: Sequence[Arena], busy: Collection[int] = ()) -> None:
        """Use `arenas`, of which those in `busy` are being written to disk, and close the present ones."""
        # `free` may be called meanwhile.
        before, self.arenas = self.arenas, ()
        self.busy = set(busy)
        self.arenas = arenas
        for arena in before:
            arena.close()

    def free(self) -> int | None:
        """The buffer with the oldest content that is not being written; None: all are, or are to be kept."""
        ages = self._ages()
        # Of two of the same step that which is being written anyway.
        newest = max(ages, key=lambda i: (ages[i], i in self.busy), default=-1)
        kept = {newest} if self._keep_newest and ages.get(newest) != _NONE else set()
        return min((i for i in ages if i not in self.busy | kept), key=ages.__getitem__, default=None)

    def newest(self) -> Arena | None:
        """That with the newest content; None: there is none."""
        ages = self._ages()
        newest = max(ages, key=ages.__getitem__, default=-1)
        return self.arenas[newest] if ages.get(newest, _NONE) != _NONE else None

    def _ages(self) -> dict[int, tuple[int, int]]:
        return {i: _age(arena) for i, arena in enumerate(self.arenas)}

    # ── one copy ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def copying(self) -> bool:
        """A copy was started, and neither finished nor dropped."""
        return self._copying is not None

    def begin(
        self,
        buffer: int,
        tensors: Sequence[torch.Tensor],
        *,
        volatile: Collection[int],
        progress: Progress = unreported,
    ) -> bool:
        """Start to copy `tensors` into an arena that was laid out for them. Returns whether the copy is complete
        already. Raises ArenaError.

        Tensors whose index is in `volatile` may be changed at once (on a GPU by the current stream). Once a copy was
        torn by a change before `finish`, all tensors are: such a script would change them during each copy.
        """
        eager = volatile if self._beside else range(len(tensors))
        fill = self.arenas[buffer].fill(tensors, volatile=eager, progress=progress)
        self._copying = buffer, fill
        return fill.done

    def finish(self) -> int | None:
        """Wait for the copy, and return its buffer, which is still to be sealed; None: there is no copy. Raises
        RuntimeError if the device failed; that copy is dropped."""
        if self._copying is None:
            return None
        (buffer, fill), self._copying = self._copying, None
        fill.finish()
        self.beside_s = fill.beside_s
        self._beside = self._beside and not fill.torn
        return buffer

    def drop(self) -> bool:
        """Drop the copy, unless it is complete or done by a GPU, which is waited for. Returns whether there is one to
        `finish`. Raises RuntimeError if the device failed."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying[1].drop()
            if copying[1].done:
                self._copying = copying
        return self.copying


_NONE = (-1, -1)


def _age(arena: Arena) -> tuple[int, int]:
    header = arena.header()
    return (header.generation, header.step) if header.complete else _NONE
