"""Reads this rank's samples of each batch, here or ahead in processes of their own, with seeded random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, StackDataset, Subset, default_collate

from elastic.worker.boot.inherited_sockets import process_init
from elastic.worker.torch_internals import torch_private

from .containers import collated
from .draws import draws
from .seeds import held_by, scatter, seed_from, seed_held, seed_turn, word
from .sharding import BatchPlan, SampleOrder, rank_range

CPU = torch.device("cpu")

_BLOCK = 16384
"""Sample indices of a rank that are computed at once, with arrays: less than a tenth of a microsecond each instead of
five. Of shorter arrays numpy's calls are the larger part."""
_FEW = 8
"""So few are computed one by one: an operation on an array costs as much."""


class Chosen(NamedTuple):
    """This rank's samples in a batch of an order that is listed."""

    step: int
    draws: int
    """For random numbers drawn in the dataset, with the position of the sample."""
    start: int
    """Position of the first one."""
    indices: tuple[int, ...]
    spare: int
    """The sample to run through the model where the rank has none."""


class Reader:
    """`reader[number]`: (indices, collated samples) of this rank in that batch of the plan, counted from the loop's
    begin; `reader[chosen]`: of the samples that are chosen. Picklable if the dataset is."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        plan: BatchPlan = BatchPlan(1, 1),  # noqa: B008 - frozen
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int,
        shuffle: bool = False,
        at: tuple[int, int, int] = (0, 0, 1),
    ) -> None:
        """`plan`: of the batches that are read by their number. `at`: (first epoch, step of the loop's begin, commits
        of a batch)."""
        self._dataset = dataset
        self._plan = plan
        self._first_epoch, self._begin, self._commits = at
        self._rank = rank
        self._world = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._collate = collate
        self.own_collate = collate is not default_collate
        self._many = _reads_many(dataset)
        self._epoch = -1
        self._order: SampleOrder
        self._draws = 0
        self._random = False
        """The dataset draws random numbers."""
        self._held: list[Any] | None = None
        """Generators of its own; None: not looked for yet, in this process."""
        self._looked = False
        self._seeded_for = -1
        """The step for whose training loop the generators of this process are seeded, and nothing was drawn since."""
        self._loop = word(seed, 1, rank)
        self._ahead: list[list[int]] = []
        """This rank's samples in some batches of equal size, one after the other."""
        self._ahead_of = 0
        """The first of these batches."""
        self._start = 0
        """Position of its first sample in the epoch."""

    def seed_loop(self, step: int) -> None:
        """Seed the generators of this process for the training loop of `step`, unless they are."""
        if self._seeded_for != step:
            seed_turn(scatter(self._loop ^ step))

    def __getitem__(self, key: int | Chosen) -> tuple[tuple[int, ...], Any]:
        if isinstance(key, Chosen):
            indices, samples = key.indices, self.samples(key)
        else:
            place = key - self._ahead_of
            if not 0 <= place < len(self._ahead):
                self._look_ahead(key)
                place = 0
            indices = tuple(self._ahead[place])
            start = self._start + place * self._plan.batch_size
            read = indices or (self._order[self._plan.at(key).start],)
            samples = self._fetch(self._begin + key * self._commits, start, read)
        return indices, collated(samples) if self._collate is default_collate else self._collate(samples)

    def samples(self, chosen: Chosen) -> list[Any]:
        """Those that are chosen, not collated."""
        self._draws = chosen.draws
        return self._fetch(chosen.step, chosen.start, chosen.indices or (chosen.spare,))

    def _look_ahead(self, number: int) -> None:
        """Determine this rank's samples in a batch, and in as many full batches after it as fit into a block."""
        plan, batch = self._plan, self._plan.at(number)
        if batch.epoch != self._epoch:
            self._epoch, epoch = batch.epoch, self._first_epoch + batch.epoch
            self._order = SampleOrder(plan.samples, self._seed, epoch, shuffle=self._shuffle)
            self._draws = word(self._seed, 0, epoch)
        start, stop = rank_range(batch.start, batch.stop, self._rank, self._world)
        size, full = stop - start, (plan.samples - batch.start) // plan.batch_size
        count = max(1, min(full, _BLOCK // max(1, size)))
        starts = np.arange(count, dtype=np.uint64) * np.uint64(plan.batch_size) + np.uint64(start)
        positions = (starts[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
        samples: Any = _at(self._order, positions) if self._shuffle else positions
        self._ahead = samples.reshape(count, size).tolist()
        self._ahead_of, self._start = number, start

    def _fetch(self, step: int, start: int, indices: tuple[int, ...]) -> list[Any]:
        self._seeded_for = -1
        if self._held is None:
            self._held = held_by(self._dataset)
            self._random = self._random or bool(self._held)
        if self._many:
            many: Any = self._dataset
            self._seed_for(start)
            return list(many.__getitems__(list(indices)))
        if self._random or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._seeded(start, indices)
        return self._watched(step, start, indices)

    def _seeded(self, start: int, indices: Sequence[int]) -> list[Any]:
        samples = []
        for position, index in enumerate(indices, start):
            self._seed_for(position)
            samples.append(self._dataset[index])
        return samples

    def _seed_for(self, position: int) -> None:
        word = scatter(self._draws ^ position)
        seed_from(word)
        if self._held:
            seed_held(self._held, word)

    def _watched(self, step: int, start: int, indices: Sequence[int]) -> list[Any]:
        """Read without seeding for each sample, if the dataset draws nothing, as most do: seeding three generators
        costs more than many samples. So they are seeded once, as for the training loop of this step, and looked at
        after the first sample of a process and from then on at the end of each batch. Once anything was drawn, that
        batch is read again, seeded, and so are all later ones."""
        samples = []
        drawn = draws()
        if not self._looked:
            self._looked = True
            seed_from(scatter(self._draws ^ start))
            drawn.mark()
            samples.append(self._dataset[indices[0]])
            if drawn.any():
                self._random = True
                return samples + self._seeded(start + 1, indices[1:])
        seed_turn(scatter(self._loop ^ step))
        drawn.mark()
        dataset = self._dataset
        samples += [dataset[index] for index in indices[len(samples) :]]
        if drawn.any():
            self._random = True
            return self._seeded(start, indices)
        if self._collate is default_collate:
            self._seeded_for = step
        else:  # it may draw: seed as after the last sample
            seed_from(scatter(self._draws ^ start + len(indices) - 1))
        return samples


def _reads_many(dataset: Any) -> bool:
    """Whether `dataset` reads several samples at once. torch's Subset and StackDataset have a `__getitems__` for
    datasets without one too, and read one sample after the other then, of which each is to be seeded."""
    if type(dataset) is Subset:
        return _reads_many(dataset.dataset)
    if type(dataset) is StackDataset:
        inner = dataset.datasets
        return any(map(_reads_many, inner.values() if isinstance(inner, dict) else inner))
    return callable(getattr(dataset, "__getitems__", None))


def take_many(order: SampleOrder, start: int, stop: int) -> tuple[int, ...]:
    """`order.take(start, stop)` for a shuffled order, with arrays."""
    return tuple(_at(order, np.arange(start, stop, dtype=np.uint64)).tolist())


def _at(order: SampleOrder, positions: Any) -> Any:
    """The samples at `positions` of a shuffled order; both are arrays of unsigned 64-bit integers."""
    permute: Callable[[Any], Any] = order.permute
    few = _FEW
    # Of so few, all are permuted once, and the passes after that only look them up.
    if order.domain <= min(_BLOCK, 8 * len(positions)):
        permute, few = permute(np.arange(order.domain, dtype=np.uint64)).take, 0
    samples = permute(positions)
    outside = np.flatnonzero(samples >= order.samples)
    while len(outside) > few:
        samples[outside] = again = permute(samples[outside])
        outside = outside[again >= order.samples]
    for place in outside.tolist():
        sample = int(samples[place])
        while sample >= order.samples:
            sample = order.permute(sample)
        samples[place] = sample
    return samples


class Reads(Protocol):
    """`reads[key]`: (indices, collated samples)."""

    def __getitem__(self, key: Any, /) -> tuple[tuple[int, ...], Any]: ...

    def seed_loop(self, step: int) -> None: ...


@contextlib.contextmanager
def loaded(
    reader: Reads, keys: Iterable[Any], num_workers: int, pin_memory: bool, **options: Any
) -> Iterator[Iterator[tuple[tuple[int, ...], Any]]]:
    """Context for an iterator over reader[key] for each of `keys`, loaded here or ahead in child processes, which end
    with the context. `options`: further ones of DataLoader."""
    if num_workers == 0:
        yield map(reader.__getitem__, keys)
        return
    options.setdefault("worker_init_fn", process_init())
    loader: DataLoader[Any] = DataLoader(
        reader,  # type: ignore[arg-type]  # __getitem__ is all that is asked of it
        batch_size=None,
        collate_fn=as_is,
        sampler=keys,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise it draws from the global one
        **options,
    )
    iterator: Any = iter(loader)
    try:
        yield iterator
    finally:
        torch_private.shut_down_workers(iterator)  # dropping it does not while a traceback holds it


def as_is(loaded: Any) -> Any:
    return loaded
