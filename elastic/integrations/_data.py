"""The micro-batches of each optimizer step: a function of the seed and the step, for any world size.

A step takes a global batch of fixed size, of which each rank has a contiguous share. A share is cut into `parts`
micro-batches of nearly equal size, the same number on each rank, because a framework's loop counts them. One may be
empty, at the end of an epoch or in a world that does not divide the batch: it then holds one sample to run through the
model, and its weight is 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from elastic.worker.boot.inherited_sockets import process_init
from elastic.worker.data.reading import Chosen, Reader, as_is, take_many
from elastic.worker.data.samplers import drawn, refuse_shares
from elastic.worker.data.seeds import seed_everything, word
from elastic.worker.data.sharding import BatchPlan, GlobalBatch, SampleOrder, rank_range
from elastic.worker.job.job import Job
from elastic.worker.link.misuse import MisuseValueError

Key = tuple[int, int]
"""(step from the start of training, number of the micro-batch)"""

Order = Callable[[int, int], Sequence[int]]
"""(start, stop) -> the samples at these positions of an epoch."""


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

    @staticmethod
    def of(job: Job, dataset: Any, sampler: Any, *, batch_size: int, parts: int, drop_last: bool) -> Steps:
        """Raises ValueError if the data has not one batch."""
        samples: int | None = None
        if not isinstance(dataset, IterableDataset):
            samples = len(dataset if sampler is None else sampler)
            if drop_last:
                samples -= samples % batch_size
            if samples < 1:
                raise MisuseValueError(f"the training data has not one batch of {batch_size} samples")
        return Steps(batch_size, parts, job.rank, job.world_size, samples)

    @property
    def per_epoch(self) -> int:
        assert self.samples is not None
        return -(-self.samples // self.batch_size)

    def whole(self, step: int) -> GlobalBatch:
        """The global batch. That of a stream is of one endless epoch."""
        if self.samples is None:
            return GlobalBatch(step, 0, step * self.batch_size, (step + 1) * self.batch_size, False)
        return BatchPlan(self.samples, self.batch_size).at(step)

    def part(self, step: int, number: int) -> tuple[int, int]:
        """Positions [start, stop) of micro-batch `number` of this rank; equal: it is empty."""
        batch = self.whole(step)
        start, stop = rank_range(batch.start, batch.stop, self.rank, self.world_size)
        return rank_range(start, stop, number, self.parts)

    def sizes(self, step: int) -> list[int]:
        """Samples in each micro-batch of this rank."""
        return [stop - start for start, stop in (self.part(step, number) for number in range(self.parts))]


def parts_needed(batch_size: int, world_size: int, most: int) -> int:
    """Micro-batches per step, so that none has more than `most` samples."""
    largest_share = -(-batch_size // world_size)
    return -(-largest_share // most)


def order_of(sampler: Iterable[int] | None, samples: int, seed: int) -> Callable[[int], Order]:
    """epoch -> the order that `sampler` stands for.

    A RandomSampler becomes a permutation by (seed, epoch). Any other sampler is run once per epoch, with the random
    generators, and its own (`generator`), seeded by (seed, epoch): its order must depend on nothing else. Raises
    ValueError for one that is a rank's share already, and if it does not yield as many samples as it did at first.
    """
    refuse_shares(sampler)
    if sampler is None or type(sampler) is SequentialSampler:
        return _sequential
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return functools.partial(_shuffled, samples, seed)
    return functools.partial(_sampled, sampler, samples, seed)


def _sequential(_epoch: int) -> Order:
    return range


def _shuffled(samples: int, seed: int, epoch: int) -> Order:
    return functools.partial(take_many, SampleOrder(samples, seed, epoch))


def _sampled(sampler: Iterable[int], samples: int, seed: int, epoch: int) -> Order:
    indices = drawn(sampler, seed, epoch)
    if len(indices) < samples:
        raise MisuseValueError(
            f"{type(sampler).__name__} yields {len(indices)} samples in epoch {epoch}, not {samples}"
        )
    return lambda start, stop: indices[start:stop]


class _Samples(Dataset[Any]):
    """A dataset that is asked for whole micro-batches, by (step, number)."""

    def __init__(self, dataset: Any, steps: Steps, order: Callable[[int], Order], seed: int) -> None:
        self.dataset = dataset
        self._steps, self._order_of, self._seed = steps, order, seed
        self._reader = Reader(dataset, as_is, seed=seed, rank=steps.rank)
        self._epoch = -1
        self._order: Order = range

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: Key) -> list[Any]:
        batch, (start, stop) = self._steps.whole(key[0]), self._steps.part(*key)
        if batch.epoch != self._epoch:
            self._epoch, self._order = batch.epoch, self._order_of(batch.epoch)
        if start == stop:
            start, stop = batch.start, batch.start + 1
        indices = tuple(map(int, self._order(start, stop)))
        return self._reader.samples(Chosen(batch.step, word(self._seed, 0, batch.epoch), start, indices, indices[0]))


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


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any] | None) -> Any:
    """`None` stands for a micro-batch that is skipped."""
    return None if samples is None else collate(samples)


def loader(
    dataset: Any,
    steps: Steps,
    *,
    sampler: Any,
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
    options.setdefault("worker_init_fn", process_init())
    if steps.samples is None:
        options["num_workers"] = min(options.get("num_workers", 0), 1)
        stream = _Stream(dataset, steps, first_step, seed, skipped=skipped)
        return DataLoader(stream, batch_size=None, collate_fn=functools.partial(_collated, collate), **options)
    order = order_of(sampler, len(dataset if sampler is None else sampler), seed)
    keys: Any = _Keys(steps)
    return Loader(_Samples(dataset, steps, order, seed), batch_sampler=keys, collate_fn=collate, **options)


def closed_to_children(data: Any) -> Any:
    """`data`, a DataLoader, whose processes drop the sockets of this one: peers must notice at once when it dies."""
    if getattr(data, "num_workers", 0) and data.worker_init_fn is None:
        data.worker_init_fn = process_init()
    return data
