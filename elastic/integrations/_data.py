"""The micro-batches of each optimizer step: a function of the seed and the step, for any world size.

A step takes a global batch of fixed size, of which each rank has a contiguous share. A share is cut into `parts`
micro-batches of nearly equal size, the same number on each rank, because a framework's loop counts them. One may be
empty, at the end of an epoch or in a world that does not divide the batch: it then holds one sample to run through the
model, and its weight is 0.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from elastic.worker.boot.inherited_sockets import leave_parents_sockets
from elastic.worker.data.reading import take_many
from elastic.worker.data.samplers import drawn, refuse_shares
from elastic.worker.data.seeds import seed_everything
from elastic.worker.data.sharding import BatchPlan, SampleOrder, rank_range
from elastic.worker.link.misuse import MisuseValueError

Key = tuple[int, int]
"""(step from the start of training, number of the micro-batch)"""


class EpochOrder(Protocol):
    """The samples of one epoch in their order."""

    def take(self, start: int, stop: int) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Steps:
    """Which samples each micro-batch of this rank has, by their positions in the epoch."""

    batch_size: int
    """Over all ranks."""
    parts: int
    """Micro-batches per step on each rank."""
    rank: int
    world_size: int
    samples: int | None
    """In an epoch; None: a stream, whose epochs follow each other without a gap."""

    @property
    def per_epoch(self) -> int:
        assert self.samples is not None
        return -(-self.samples // self.batch_size)

    def whole(self, step: int) -> tuple[int, int, int]:
        """(epoch, first position, position behind the last) of the global batch."""
        if self.samples is None:
            return 0, step * self.batch_size, (step + 1) * self.batch_size
        batch = BatchPlan(self.samples, self.batch_size).at(step)
        return batch.epoch, batch.start, batch.stop

    def part(self, step: int, number: int) -> tuple[int, int]:
        """Positions [start, stop) of micro-batch `number` of this rank; equal: it is empty."""
        _, start, stop = self.whole(step)
        start, stop = rank_range(start, stop, self.rank, self.world_size)
        return rank_range(start, stop, number, self.parts)

    def sizes(self, step: int) -> list[int]:
        """Samples in each micro-batch of this rank."""
        return [stop - start for start, stop in (self.part(step, number) for number in range(self.parts))]

    def size(self, step: int) -> int:
        """Samples in the global batch."""
        _, start, stop = self.whole(step)
        return stop - start


def parts_needed(batch_size: int, world_size: int, most: int) -> int:
    """Micro-batches per step, so that none has more than `most` samples."""
    largest_share = -(-batch_size // world_size)
    return -(-largest_share // most)


class _Shuffled:
    """A permutation that is computed piece by piece: no epoch is ever listed."""

    _BLOCK = 4096

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._order = SampleOrder(samples, seed, epoch)
        self._samples = samples
        self._block: tuple[int, tuple[int, ...]] = (-1, ())

    def take(self, start: int, stop: int) -> Sequence[int]:
        if self._samples == 1:
            return (0,) * (stop - start)
        found: tuple[int, ...] = ()
        while start < stop:
            number, offset = divmod(start, self._BLOCK)
            if self._block[0] != number:
                first = number * self._BLOCK
                self._block = number, take_many(self._order, first, min(first + self._BLOCK, self._samples))
            piece = self._block[1][offset : offset + stop - start]
            found += piece
            start += len(piece)
        return found


class _Listed:
    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples

    def take(self, start: int, stop: int) -> Sequence[int]:
        return self._samples[start:stop]


def order_of(sampler: Iterable[int] | None, samples: int, seed: int) -> Callable[[int], EpochOrder]:
    """epoch -> the order that `sampler` stands for.

    A RandomSampler becomes a permutation by (seed, epoch). Any other sampler is run once per epoch, with the random
    generators, and its own (`generator`), seeded by (seed, epoch): its order must depend on nothing else. Raises
    ValueError for one that is a rank's share already, and if it does not yield as many samples as it did at first.
    """
    refuse_shares(sampler)
    if sampler is None or type(sampler) is SequentialSampler:
        return functools.partial(_sequential, samples)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return functools.partial(_Shuffled, samples, seed)
    return functools.partial(_sampled, sampler, samples, seed)


def _sequential(samples: int, _epoch: int) -> EpochOrder:
    return _Listed(range(samples))


def _sampled(sampler: Iterable[int], samples: int, seed: int, epoch: int) -> EpochOrder:
    found = drawn(sampler, seed, epoch)
    if len(found) < samples:
        raise MisuseValueError(f"{type(sampler).__name__} yields {len(found)} samples in epoch {epoch}, not {samples}")
    return _Listed(found)


def count(dataset: Any, sampler: Any) -> int:
    """Samples in an epoch, before an incomplete batch is left out."""
    return len(dataset if sampler is None else sampler)


class _Samples(Dataset[Any]):
    """A dataset that is asked for whole micro-batches, by (step, number)."""

    def __init__(self, dataset: Any, steps: Steps, order: Callable[[int], EpochOrder], seed: int) -> None:
        self.dataset = dataset
        self._steps = steps
        self._order_of = order
        self._seed = seed
        self._epoch = -1
        self._order: EpochOrder = _Listed(())

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: Key) -> list[Any]:
        step, number = key
        epoch, first, _ = self._steps.whole(step)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        start, stop = self._steps.part(step, number)
        if start == stop:
            start, stop = first, first + 1
        indices = [int(index) for index in self._order.take(start, stop)]
        seed_everything(self._seed, 0, epoch, start)  # draws in the dataset and in the collator
        if (many := getattr(self.dataset, "__getitems__", None)) is not None:
            return list(many(indices))
        return [self.dataset[index] for index in indices]


class _Keys:
    """The batch sampler of one epoch: names of micro-batches, so that skipping some costs nothing."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._epoch = self._skipped = 0
        self.batch_size = None
        self.drop_last = False

    def set_epoch(self, epoch: int, skipped: int = 0) -> None:
        self._epoch, self._skipped = epoch, skipped

    def __len__(self) -> int:
        return self._steps.per_epoch * self._steps.parts

    def __iter__(self) -> Iterator[Key]:
        first = self._epoch * self._steps.per_epoch
        steps = range(first + self._skipped, first + self._steps.per_epoch)
        return itertools.product(steps, range(self._steps.parts))


class Loader(DataLoader[Any]):
    """A DataLoader over the micro-batches of one epoch."""

    def set_epoch(self, epoch: int, skipped: int = 0) -> None:
        """Set the plan of the next iterator, which leaves out the micro-batches of the first `skipped` steps."""
        if isinstance(self.batch_sampler, _Keys):
            self.batch_sampler.set_epoch(epoch, skipped)


class _Stream(IterableDataset[Any]):
    """A stream in micro-batches, each a list of samples; endless: its epochs follow each other.

    It begins with `skipped` entries of None, for a framework that skips what was trained. Every rank reads all samples
    and keeps its own, so that any world size takes the same ones.
    """

    def __init__(self, dataset: Iterable[Any], steps: Steps, first_step: int, seed: int, *, skipped: bool) -> None:
        self.dataset = dataset
        self._steps = steps
        self._first = first_step
        self._seed = seed
        self._skipped = skipped

    def __iter__(self) -> Iterator[list[Any] | None]:
        steps, size = self._steps, self._steps.batch_size
        if self._skipped:
            yield from itertools.repeat(None, self._first * steps.parts)
        seed_everything(self._seed, 0, 0, 0)
        samples = itertools.islice(endless(self.dataset), self._first * size, None)
        for step in itertools.count(self._first):
            batch = list(itertools.islice(samples, size))
            for number in range(steps.parts):
                start, stop = (position - step * size for position in steps.part(step, number))
                yield batch[start:stop] or batch[:1]


def endless(dataset: Iterable[Any]) -> Iterator[Any]:
    """The samples of `dataset`, epoch after epoch. Raises ValueError for an epoch without any."""
    for epoch in itertools.count():
        if (set_epoch := getattr(dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)
        empty = True
        for sample in dataset:
            empty = False
            yield sample
        if empty:
            raise MisuseValueError(f"the training data yields no sample in epoch {epoch}")


class _Collate:
    """Collates what is there: `None` stands for a micro-batch that is skipped."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any] | None) -> Any:
        return None if samples is None else self._collate(samples)


def loader(
    dataset: Any,
    steps: Steps,
    *,
    sampler: Iterable[int] | None,
    collate: Callable[[list[Any]], Any],
    seed: int,
    first_step: int,
    skipped: bool = True,
    **options: Any,
) -> DataLoader[Any]:
    """A DataLoader of this rank's micro-batches. `options`: num_workers, pin_memory and others of DataLoader.

    For a dataset with a length: of one epoch, which `Loader.set_epoch` selects. For a stream: of all steps from
    `first_step` on, after `first_step` × parts entries of None if `skipped`; read by one process.
    """
    options.setdefault("generator", torch.Generator())  # otherwise its iterators draw from the global one
    options.setdefault("worker_init_fn", functools.partial(leave_parents_sockets, parent=os.getpid()))
    if steps.samples is None:
        options["num_workers"] = min(options.get("num_workers", 0), 1)
        stream = _Stream(dataset, steps, first_step, seed, skipped=skipped)
        return DataLoader(stream, batch_size=None, collate_fn=_Collate(collate), **options)
    samples = _Samples(dataset, steps, order_of(sampler, count(dataset, sampler), seed), seed)
    keys: Any = _Keys(steps)
    return Loader(samples, batch_sampler=keys, collate_fn=collate, **options)


def closed_to_children(data: Any) -> Any:
    """`data`, a DataLoader, whose processes drop the sockets of this one: peers must notice at once when it dies."""
    if getattr(data, "num_workers", 0) and data.worker_init_fn is None:
        data.worker_init_fn = functools.partial(leave_parents_sockets, parent=os.getpid())
    return data
