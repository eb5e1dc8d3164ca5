"""The random generators of a forked worker, in the state that they have in a new interpreter.

Forks of one process share the states of its generators. In a new interpreter those of Python, numpy and torch (CPU) are
seeded by the operating system, so that ranks that set no seed draw different numbers. A generator that an import of the
script has seeded keeps its state. (Python itself seeds its generator anew in each fork.)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_renewals: list[Callable[[], object]] = []


@contextmanager
def watched() -> Iterator[None]:
    """The block imports the script's modules. Sets up the work of `renew` in forks of this process."""
    # After one draw, some 600 more leave the words of a Mersenne Twister as they are: only a seed changes them.
    random.getrandbits(32)
    python = _of_python()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.random_sample()
        words = _of_numpy(numpy)
    if torch is not None:
        seed = torch.initial_seed()
    yield
    if _of_python() != python:
        state = random.getstate()
        _renewals.append(lambda: random.setstate(state))
    if numpy is not None and _of_numpy(numpy) == words:
        _renewals.append(numpy.random.seed)
    if torch is not None and torch.initial_seed() == seed:
        _renewals.append(torch.default_generator.seed)


def renew() -> None:
    """To be called in a fork. Changes nothing in a process that was not forked."""
    for change in _renewals:
        change()


@contextmanager
def torch_unchanged() -> Iterator[None]:
    """Draws from torch's generator in the block leave no trace."""
    import torch

    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _of_python() -> tuple[int, ...]:
    words: tuple[int, ...] = random.getstate()[1][:-1]  # without the position
    return words


def _of_numpy(numpy: Any) -> list[int]:
    words: list[int] = numpy.random.get_state()[1].tolist()
    return words
