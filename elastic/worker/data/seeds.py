"""Seeds of the random generators of Python, numpy and torch: the global ones, and those that an object holds."""

from __future__ import annotations

import random
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from .draws import Draws
from .sharding import derive

_WORD = 0xFFFFFFFFFFFFFFFF
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LOOKED_AT = 256
"""Objects that are looked at for generators."""
_LONG = 32
"""A list of more entries is data."""


def seed_everything(seed: int, *path: int) -> None:
    """Seed the global generators of Python, numpy and torch from (seed, *path). A few microseconds without CUDA."""
    seed_from(word(seed, *path))


def word(seed: int, *path: int) -> int:
    """64 bits that depend on every argument."""
    low, high = derive(seed, *path)[:2]
    return high << 32 | low


def seed_from(word: int) -> None:
    """Seed the three generators from 64 bits."""
    random.seed(word)
    np.random.seed(word >> 32)
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(word)


def seed_turn(word: int) -> None:
    """`seed_from`, for one turn of a loop: what the script draws in it depends on nothing before."""
    Generators.seeded = True
    seed_from(word)


class Generators:
    """The global generators of this process, over its entries of `train`. See `draws` for how a draw is seen."""

    seeded = False
    """Whether a loop that seeds each of its turns has begun."""

    def __init__(self) -> None:
        self._first: list[Any] = []
        self._draws: Draws | None = None

    def enter(self) -> None:
        """`train` is entered. Where a loop seeds its turns, with the states of the first entry: what it draws before
        that loop (an order, noise that is kept) is the same on survivors and replacements. Not where nothing seeds:
        there each entry would draw the same batches."""
        if not self._first:
            on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
            self._first = [random.getstate(), np.random.get_state(), torch.get_rng_state(), on_cuda]
            self._draws = Draws()
            self._draws.mark()
        elif self.seeded:
            python, numpy, cpu, on_cuda = self._first
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if on_cuda:
                torch.cuda.set_rng_state_all(on_cuda)

    def unseeded(self) -> str:
        """To be asked after a step: what to say of a loop that draws and is not seeded, once."""
        drawn, self._draws = self._draws, None
        return UNSEEDED if drawn is not None and not self.seeded and drawn.any() else ""


UNSEEDED = (
    "train() draws random numbers (a shuffle, dropout) in a loop whose steps nothing seeds: after a failure its ranks "
    "go on with other numbers than undisturbed, and a replacement with others than its predecessor. Loop over "
    "job.batches(…), or over job.steps(range(N), state), which seed each step"
)


def scatter(word: int) -> int:
    """Map 64 bits to 64 bits, each depending on all (the finalizer of splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def held_by(holder: Any) -> list[Any]:
    """The generators of its own that an object, such as a dataset, has as attributes, or objects in it have
    (transforms, the dataset of a Subset)."""
    generators: list[Any] = []
    seen: set[int] = set()
    waiting = [holder]
    while waiting and len(seen) < _LOOKED_AT:
        each = waiting.pop(0)
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, torch.Tensor, np.ndarray)):
            continue
        seen.add(id(each))
        if isinstance(each, _GENERATORS):
            generators.append(each)
        elif isinstance(each, (list, tuple)):
            waiting += each if len(each) <= _LONG else ()
        else:
            waiting += (getattr(each, "__dict__", None) or {}).values()
    return generators


def seed_held(generators: list[Any], word: int) -> None:
    """Seed what `held_by` has found from 64 bits."""
    for each in generators:
        if isinstance(each, torch.Generator):
            each.manual_seed(word)
        elif isinstance(each, np.random.Generator):
            kind: Any = type(each.bit_generator)
            each.bit_generator.state = kind(word).state
        else:
            each.seed(word if isinstance(each, random.Random) else word >> 32)
