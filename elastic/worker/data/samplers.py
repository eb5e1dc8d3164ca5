"""The order of an epoch by a sampler of the script's own."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import DistributedSampler

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

from .seeds import held_by, seed_everything, seed_held, word
from .sharding import no_full_batch

ENDLESS = 64
"""A sampler without a length that yields more than so many indices for each sample is taken for endless."""


def refuse_shares(sampler: Any) -> None:
    """Raises MisuseValueError for a sampler that gives one rank's part, MisuseTypeError for what can be read once."""
    for each in _inner(sampler):
        if isinstance(each, DistributedSampler) and each.num_replicas > 1:
            raise MisuseValueError(
                f"DistributedSampler(num_replicas={each.num_replicas}): elastic shares the samples out to the ranks, "
                "and would share one rank's part of them out again; give the dataset without it, with shuffle=True or "
                "another sampler over all samples"
            )
    if isinstance(sampler, Iterator):
        raise MisuseTypeError(
            f"the sampler is a {type(sampler).__name__}, which can be read once only: give an object that can be "
            "iterated again for each epoch, such as one whose __iter__ is the generator function"
        )


def set_epoch(loader: Any, epoch: int, seed: int) -> None:
    """Tell a sampler or loader, and what is in it, the epoch; seed their own generators, and the global ones."""
    for each in _inner(loader):
        if callable(told := getattr(each, "set_epoch", None)):
            told(epoch)
    # They are as far as this process has got: on another rank elsewhere.
    seed_held(held_by(loader), word(seed, 2, epoch))
    seed_everything(seed, 2, epoch)


def _inner(outer: Any) -> Iterator[Any]:
    """It, and the samplers and the dataset in it."""
    seen: list[Any] = []
    waiting = [outer]
    while waiting and len(seen) < 16:
        each = waiting.pop()
        if each is None or any(each is known for known in seen):
            continue
        seen.append(each)
        yield each
        waiting += [getattr(each, name, None) for name in ("dataset", "sampler", "batch_sampler")]


def drawn(sampler: Iterable[Any], seed: int, epoch: int, most: float = math.inf) -> list[Any]:
    """What `sampler` yields, at most `most` of it, with the global generators, and its own, seeded by (seed, epoch)."""
    set_epoch(sampler, epoch, seed)
    return list(sampler if most == math.inf else itertools.islice(sampler, math.ceil(most)))


def bounded(sampler: Any, seed: int, epoch: int, *, most: float, samples: int) -> list[Any]:
    """`drawn`. Raises MisuseValueError for one without an end, unless there is a limit, or with nothing in it."""
    endless = ENDLESS * samples + 1024
    if most == math.inf and not hasattr(sampler, "__len__"):
        most = endless + 1
    if len(indices := drawn(sampler, seed, epoch, most)) > endless:
        raise MisuseValueError(f"{type(sampler).__name__} has no end: give job.batches a number of steps, steps=…")
    if not indices:
        raise MisuseValueError(f"{type(sampler).__name__} gives nothing in epoch {epoch}")
    return indices


def cut_up(indices: Sequence[Any], batch_size: int, *, drop_last: bool) -> list[Sequence[Any]]:
    """In batches. Raises MisuseValueError where none is full and all others are left out."""
    stop = len(indices) - len(indices) % batch_size if drop_last else len(indices)
    if not stop:
        raise no_full_batch(len(indices), batch_size)
    return [indices[start : start + batch_size] for start in range(0, stop, batch_size)]


def whole_indices(batches: Iterable[Iterable[Any]], name: str) -> list[list[Any]]:
    """Of each batch. Raises MisuseTypeError for what is no batch, MisuseValueError for an empty one."""
    try:
        indices = [[_whole(index) for index in batch] for batch in batches]
    except TypeError:
        raise MisuseTypeError(f"{name} yields single indices: give it as sampler=…, with a batch_size") from None
    if not all(indices):
        raise MisuseValueError(f"{name} yields an empty batch")
    return indices


def _whole(index: Any) -> Any:
    try:
        return operator.index(index)
    except TypeError:
        return index  # a key of another kind


def order_hash(batches: Sequence[Sequence[Any]]) -> str:
    """Of the indices and of how they are cut into batches."""
    flat = list(itertools.chain.from_iterable(batches))
    try:
        raw = np.asarray(flat, dtype=np.int64).tobytes()
    except (TypeError, ValueError, OverflowError):
        raw = repr(flat).encode()
    found = xxhash.xxh3_64(raw)
    found.update(np.asarray([len(batch) for batch in batches], dtype=np.int64).tobytes())
    return found.hexdigest()
