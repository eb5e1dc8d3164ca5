"""Batches by step number: the data of a step, whatever happened before it and for any world size."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, StackDataset, Subset, default_collate

from .. import torch_private
from ..boot.inherited_sockets import leave_parents_sockets
from ..comm.ddp import GradientWeight
from ..misuse import MisuseRuntimeError, MisuseTypeError
from .arguments import at_most, plan_of
from .collate import collated
from .columns import cut
from .containers import moved
from .draws import draws
from .sharding import BatchPlan, SampleOrder, derive, micro_sizes, most_of, rank_range

_BLOCK = 16384
"""Sample indices of a rank that are computed at once, with arrays: less than a tenth of a microsecond each instead of
five. Of shorter arrays numpy's calls are the larger part."""
_FEW = 8
"""So few are computed one by one: an operation on an array costs as much."""

_WORD = 0xFFFFFFFFFFFFFFFF


class MapDataset(Protocol):
    """`dataset[i]` and `len(dataset)`. As in torch, `__getitems__(indices)` is used if there is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class HasStep(Protocol):
    @property
    def step(self) -> int: ...


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's part of one step's global batch, on the job's device."""

    data: Any
    """The collated samples of this rank."""

    indices: tuple[int, ...]
    """Dataset indices of this rank's samples. Empty if the rank has none in this step: `data` then holds one sample
    to run through the model, as every rank must take part in the all-reduce of gradients; its weight is 0."""

    step: int
    epoch: int
    global_size: int
    """Number of samples of this step over all ranks."""

    micro_batch: int | None = None
    cut_somewhere: bool = False
    """Some rank has several micro-batches in this step: what is refused there is refused on all ranks."""
    gradient_weight: GradientWeight | None = None
    own_collate: bool = False
    """`data` was made by a `collate` of the script's own."""

    @property
    def x(self) -> Any:
        """The inputs, for a dataset of pairs: `dataset[i] == (x, y)`. Raises TypeError for other datasets."""
        return self._pair[0]

    @property
    def y(self) -> Any:
        """The targets, likewise."""
        return self._pair[1]

    def __iter__(self) -> Iterator[Any]:
        """The parts of `data` for a dataset of tuples: ``for x, y in job.batches(…)``. Raises TypeError for others."""
        if not isinstance(self.data, (tuple, list)):
            raise MisuseTypeError(f"a batch of {type(self.data).__name__} has no parts to unpack: it is in batch.data")
        return iter(self.data)

    @property
    def _pair(self) -> Any:
        if not (isinstance(self.data, (tuple, list)) and len(self.data) == 2):
            raise MisuseTypeError(
                "batch.x and batch.y are for datasets of pairs (x, y); this one's batches are in batch.data"
            )
        return self.data

    @property
    def size(self) -> int:
        """Number of samples on this rank."""
        return len(self.indices)

    @property
    def weight(self) -> float:
        """`size / global_size`: the weight of this rank's mean loss in the mean over the global batch."""
        return self.size / self.global_size

    def parts(self) -> Iterator[Batch]:
        """The same samples in micro-batches of at most `micro_batch`, for `loss.backward()` on each in turn.

        Gradients accumulate to the exact mean over the global batch; they are exchanged during the last backward only.
        Raises RuntimeError if an earlier backward, or loop, has left gradients that no optimizer has applied, or if the
        batch is not of this step, and TypeError for what `columns.cut` cannot cut.
        """
        sizes, weight = micro_sizes(self.size, self.micro_batch), self.gradient_weight
        if weight is not None:
            weight.refuse_used(self)
        if weight is None or (len(sizes) == 1 and not self.cut_somewhere):
            yield from self._cut(sizes)
            return
        parts = weight.enter_parts(self.weight)
        try:
            yield from self._cut(sizes)
        finally:
            weight.leave_parts(parts)

    def _cut(self, sizes: Sequence[int]) -> Iterator[Batch]:
        """Micro-batches of these sizes, each with its weight."""
        start = 0
        for number, size in enumerate(sizes):
            if self.gradient_weight is not None:
                if number and size != sizes[number - 1]:
                    self.gradient_weight.rescale(sizes[number - 1] / size)
                self.gradient_weight.begin(size / self.global_size, exchange=number == len(sizes) - 1)
            yield self if len(sizes) == 1 else self._slice(start, start + size)
            start += size
        if self.gradient_weight is not None:
            self.gradient_weight.finish()

    def _slice(self, start: int, stop: int) -> Batch:
        return Batch(
            data=cut(self.data, self.size, start, stop, own=self.own_collate),
            indices=self.indices[start:stop],
            step=self.step,
            epoch=self.epoch,
            global_size=self.global_size,
            own_collate=self.own_collate,
        )


def refuse_uncommitted(state: HasStep, step: int) -> None:
    """The turn of `step` has ended. Raises RuntimeError if it was not committed, or more than once."""
    if state.step != step + 1:
        taken = " A loop of which a batch is taken in some steps only is made anew there: next(job.batches(…))"
        raise MisuseRuntimeError(
            f"step {step} ended with state.step = {state.step}: call job.commit(state) once, "
            "at the end of each turn, after the optimizer's step; to accumulate gradients: micro_batch=…."
            f"{taken if state.step > step + 1 else ''}"
        )


def batches(
    dataset: MapDataset,
    state: HasStep,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool = True,
    micro_batch: int | None = None,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
    gradient_weight: GradientWeight | None = None,
    on_turn: Callable[[Any, int], None] = refuse_uncommitted,
) -> Iterator[Batch]:
    """Yield this rank's part of each step from `state.step` on; `state.step` must grow by one per turn (`job.commit`).

    `batch_size` is the number of samples over all ranks and does not change with the world size. `epochs` and `steps`
    are totals from the start of training, and the smaller one counts; neither: one epoch. `micro_batch`: see
    `Batch.parts`. `num_workers` processes load ahead; they end with the iterator, and with this process. `on_turn` is
    called with the state and the step when a turn has ended, before the next batch is loaded.

    Random numbers drawn in `dataset[i]` depend only on (seed, epoch, position of the sample in the epoch), so they are
    the same for any world size; those drawn in the training loop (dropout) depend on (seed, step, rank). This holds for
    Python's `random`, numpy's global generator and torch's, on CPU and CUDA. Those drawn in a `__getitems__` depend on
    the position of its first sample, and so on the world size.

    Raises TypeError for data that cannot be read by number and for numbers that are not whole, ValueError for an empty
    dataset or invalid sizes, RuntimeError if a turn ends without a commit.
    """
    plan, micro_batch = plan_of(dataset, batch_size), at_most("micro_batch", micro_batch)
    micro_sizes(1, micro_batch)  # raises for an invalid one at the first call, not in the loop
    load = _Parts(dataset, plan, rank, world_size, seed, shuffle, collate or default_collate)
    last = plan.total_steps(epochs=at_most("epochs", epochs), steps=at_most("steps", steps))
    ours, away = range(state.step, last), elsewhere(device)
    with loaded(load, ours, num_workers, pin_memory) as ahead:
        for step, (indices, data) in zip(ours, ahead, strict=True):
            all_ranks = plan.at(step)
            load.seed_loop(step)
            batch = Batch(
                data=move(away, data),
                indices=indices,
                step=step,
                epoch=all_ranks.epoch,
                global_size=all_ranks.size,
                micro_batch=micro_batch,
                cut_somewhere=micro_batch is not None and most_of(all_ranks.size, world_size) > micro_batch,
                gradient_weight=gradient_weight,
                own_collate=load.own_collate,
            )
            if gradient_weight is not None:
                gradient_weight.take(batch.weight, batch)
            yield batch
            on_turn(state, step)


def seed_everything(seed: int, *path: int) -> None:
    """Seed the global generators of Python, numpy and torch from (seed, *path). A few microseconds without CUDA."""
    _seed(word(seed, *path))


def word(seed: int, *path: int) -> int:
    """64 bits that depend on every argument."""
    low, high = derive(seed, *path)[:2]
    return high << 32 | low


def _seed(word: int) -> None:
    """Seed the three generators from 64 bits."""
    random.seed(word)
    np.random.seed(word >> 32)
    torch.default_generator.manual_seed(word)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(word)


def _scatter(word: int) -> int:
    """Map 64 bits to 64 bits, each depending on all (the finalizer of splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


class _Parts:
    """`parts[step]`: (indices, collated samples) of this rank in that step. Picklable if the dataset is."""

    def __init__(
        self,
        dataset: MapDataset,
        plan: BatchPlan,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._dataset = dataset
        self._plan = plan
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
        self._looked = False
        self._seeded_for = -1
        """The step for whose training loop the generators of this process are seeded, and nothing was drawn since."""
        self._loop = word(seed, 1, rank)
        self._ahead: list[list[int]] = []
        """This rank's samples in some steps of equal size, one after the other."""
        self._ahead_of = 0
        """The first of these steps."""
        self._start = 0
        """Position of its first sample in the epoch."""

    def seed_loop(self, step: int) -> None:
        """Seed the generators of this process for the training loop of `step`, unless they are."""
        if self._seeded_for != step:
            _seed(_scatter(self._loop ^ step))

    def __getitem__(self, step: int) -> tuple[tuple[int, ...], Any]:
        place = step - self._ahead_of
        if not 0 <= place < len(self._ahead):
            self._look_ahead(step)
            place = 0
        indices = tuple(self._ahead[place])
        start = self._start + place * self._plan.batch_size
        read = indices or (self._order[self._plan.at(step).start],)
        samples = self._fetch(step, start, read)
        return indices, collated(samples) if self._collate is default_collate else self._collate(samples)

    def _look_ahead(self, step: int) -> None:
        """Determine this rank's samples in `step`, and in as many full steps after it as fit into a block."""
        plan, whole = self._plan, self._plan.at(step)
        if whole.epoch != self._epoch:
            self._epoch = whole.epoch
            self._order = SampleOrder(plan.samples, self._seed, whole.epoch, shuffle=self._shuffle)
            self._draws = word(self._seed, 0, whole.epoch)
        start, stop = rank_range(whole.start, whole.stop, self._rank, self._world)
        size, full = stop - start, (plan.samples - whole.start) // plan.batch_size
        count = max(1, min(full, _BLOCK // max(1, size)))
        starts = np.arange(count, dtype=np.uint64) * np.uint64(plan.batch_size) + np.uint64(start)
        positions = (starts[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
        samples: Any = _at(self._order, positions) if self._shuffle else positions
        self._ahead = samples.reshape(count, size).tolist()
        self._ahead_of, self._start = step, start

    def _fetch(self, step: int, start: int, indices: tuple[int, ...]) -> list[Any]:
        self._seeded_for = -1
        if self._many:
            many: Any = self._dataset
            _seed(_scatter(self._draws ^ start))
            return list(many.__getitems__(list(indices)))
        if self._random or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._seeded(start, indices)
        return self._watched(step, start, indices)

    def _seeded(self, start: int, indices: Sequence[int]) -> list[Any]:
        samples = []
        for position, index in enumerate(indices, start):
            _seed(_scatter(self._draws ^ position))
            samples.append(self._dataset[index])
        return samples

    def _watched(self, step: int, start: int, indices: Sequence[int]) -> list[Any]:
        """Read without seeding for each sample, if the dataset draws nothing, as most do: seeding three generators
        costs more than many samples. So they are seeded once, as for the training loop of this step, and looked at
        after the first sample of a process and from then on at the end of each batch. Once anything was drawn, that
        batch is read again, seeded, and so are all later ones."""
        samples = []
        drawn = draws()
        if not self._looked:
            self._looked = True
            _seed(_scatter(self._draws ^ start))
            drawn.mark()
            samples.append(self._dataset[indices[0]])
            if drawn.any():
                self._random = True
                return samples + self._seeded(start + 1, indices[1:])
        _seed(_scatter(self._loop ^ step))
        drawn.mark()
        dataset = self._dataset
        samples += [dataset[index] for index in indices[len(samples) :]]
        if drawn.any():
            self._random = True
            return self._seeded(start, indices)
        if self._collate is default_collate:
            self._seeded_for = step
        else:  # it may draw: seed as after the last sample
            _seed(_scatter(self._draws ^ start + len(indices) - 1))
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
    if order.domain <= _BLOCK:  # of so few, all are permuted once, and the passes after that only look them up
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


class Parts(Protocol):
    """`parts[number]`: (indices, collated samples)."""

    def __getitem__(self, number: int, /) -> tuple[tuple[int, ...], Any]: ...


@contextlib.contextmanager
def loaded(
    parts: Parts, steps: range, num_workers: int, pin_memory: bool
) -> Iterator[Iterator[tuple[tuple[int, ...], Any]]]:
    """Context for an iterator over parts[step] for each of `steps`, loaded here or ahead in child processes, which end
    with the context."""
    if num_workers == 0:
        yield map(parts.__getitem__, steps)
        return
    loader: DataLoader[Any] = DataLoader(
        parts,  # type: ignore[arg-type]  # __getitem__ is all that is asked of it
        batch_size=None,
        collate_fn=as_is,
        sampler=steps,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=functools.partial(leave_parents_sockets, parent=os.getpid()),
        generator=torch.Generator(),  # otherwise it draws from the global one
    )
    iterator: Any = iter(loader)
    try:
        yield iterator
    finally:
        torch_private.shut_down_workers(iterator)  # dropping it does not while a traceback holds it


def as_is(loaded: Any) -> Any:
    return loaded


def elsewhere(device: torch.device | str | None) -> torch.device | None:
    """`device`, unless it is the CPU, where batches are loaded."""
    found = None if device is None else torch.device(device)
    return None if found is None or found.type == "cpu" else found


def move(device: torch.device | None, data: Any) -> Any:
    """`data` with its tensors on `device`, which is of `elsewhere`."""
    return data if device is None else moved(data, device)
