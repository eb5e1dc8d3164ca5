"""Detects draws from the global random generators of Python, numpy and torch, in a microsecond or two.

All three are Mersenne Twisters: a table of 624 words and a position in it. A draw moves the position, and renews the
table at its end; a seed makes another table. Copying the states to compare them (`random.getstate`,
`numpy.random.get_state`) takes 50 µs, more than many samples take to read. To seed them with a known number first, and
to draw one number from each afterwards, takes 10.7 µs (2026-11-23), as long as the seeds that each step needs anyway:
still a sixth of what a DataLoader takes for a batch of 8 small samples. So position and first words are read where the
generators have them, in 1 µs; where they are not found there, by trial, the states are compared after all.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from elastic.worker.torch_internals import torch_private

_WORDS = 624
_TORCH_HEAD, _UNLIKELY = 256, 0x9D5C_31A7_E2B4_8F60
"""torch's generator is an object of more than 2496 bytes; within these first ones lie its seed and position, found by a
seed that nothing else there is equal to."""


@functools.cache
def draws() -> Draws:
    """The one of this process."""
    return Draws()


class Draws:
    """`mark` right after the generators were seeded, and later `any`: whether anything was drawn, or seeded, since."""

    def __init__(self) -> None:
        self._numpy = get_bit_generator()
        self._python = _shared()
        self._views = self._found()
        self._before: object = None

    def mark(self) -> None:
        self._before = self._positions()

    def any(self) -> bool:
        return self._positions() != self._before

    def _positions(self) -> object:
        if self._views is None or get_bit_generator() is not self._numpy or _shared() is not self._python:
            return states()
        return b"".join(self._views)

    def _found(self) -> tuple[memoryview, ...] | None:
        """Python's position and first words, numpy's first words and its position, torch's seed and position; None if
        they are elsewhere. Leaves the generators as they were."""
        if not isinstance(self._numpy, np.random.MT19937) or not isinstance(self._python, random.Random):
            return None
        before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        start = id(self._python) + object.__basicsize__
        table: Any = self._numpy.ctypes.state_address
        try:
            generator = torch_private.default_generator_address()
            torch.default_generator.manual_seed(_UNLIKELY)
            at = ctypes.string_at(generator, _TORCH_HEAD).find(struct.pack("Q", _UNLIKELY))
            self._views = (
                _view(start, 12),
                _view(table, 8),
                _view(table + 4 * _WORDS, 4),
                _view(generator + at, 24),
            )
            return self._views if at > 0 and self._sees_each_draw() else None
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.default_generator.set_state(before[2])

    def _sees_each_draw(self) -> bool:
        # On the CPU also where the script has set another default device: a draw there would be none of this generator.
        for draw in (random.random, np.random.random_sample, lambda: torch.rand((), device="cpu")):
            random.seed(1)
            np.random.seed(1)
            torch.default_generator.manual_seed(1)
            self.mark()
            if self.any():
                return False
            for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
                seed(2)
                if not self.any():
                    return False
                seed(1)
            self.mark()  # torch leaves other bytes between its fields at each seed
            for count in range(2 * _WORDS + 2):  # a draw takes one word or two: beyond the ends of the table
                draw()
                if count % (_WORDS // 2) in (0, 1, _WORDS // 2 - 1) and not self.any():
                    return False
        return True


def states() -> tuple[object, ...]:
    """The states of the three generators."""
    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), numpy[0], bytes(numpy[1]), numpy[2:], bytes(torch.default_generator.get_state().numpy())


def _shared() -> Any:
    """Python's generator behind `random.random`; None if that is a function of another kind."""
    return getattr(random.random, "__self__", None)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
