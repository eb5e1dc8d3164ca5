"""Seeds of the random generators of Python, numpy and torch: the global ones, and those that an object holds."""

from __future__ import annotations

import random
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

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
