"""Seeds of the global random generators of Python, numpy and torch."""

from __future__ import annotations

import random

import numpy as np
import torch

from .sharding import derive

_WORD = 0xFFFFFFFFFFFFFFFF


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
