"""Batches by step number: the data of a step, whatever happened before it and for any world size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Unpack

import msgspec
import torch
from torch.utils.data import default_collate

from elastic.worker.comm.ddp import GradientWeight
from elastic.worker.link.misuse import MisuseRuntimeError, MisuseTypeError, MisuseValueError
from elastic.worker.state.parts.data_progress import DataProgress
from elastic.worker.state.state import State

from .arguments import LoopOptions, at_most, plan_of
from .columns import cut
from .reading import CPU, Reader
from .samplers import bounded, cut_up, order_hash, refuse_shares, whole_indices
from .sharding import micro_sizes, most_of
from .turns import Loop, shared_out


class MapDataset(Protocol):
    """`dataset[i]` and `len(dataset)`. As in torch, `__getitems__(indices)` is used if there is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
    part: int = 0
    """Number of this step among those of the batch, with `commits`."""
    last_of_epoch: bool = False

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

    def __getitem__(self, key: Any, /) -> Any:
        """As `data[key]`: ``batch["tokens"]`` for a dataset of dicts."""
        return self.data[key]

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise MisuseTypeError(f"{function.__name__} got a Batch where it needs a tensor: the samples are in batch.data")

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
        return msgspec.structs.replace(
            self,
            data=cut(self.data, self.size, start, stop, own=self.own_collate),
            indices=self.indices[start:stop],
            micro_batch=None,
            cut_somewhere=False,
            gradient_weight=None,
        )


def refuse_uncommitted(state: State, step: int) -> None:
    """The turn of `step` has ended. Raises RuntimeError if it was not committed, or more than once."""
    if state.step != step + 1:
        taken = " If you need a batch in only some steps, create the loop there: next(job.batches(…))"
        raise MisuseRuntimeError(
            f"step {step} ended with state.step = {state.step}: call job.commit(state) once, "
            "at the end of each turn, after the optimizer's step; to accumulate gradients: micro_batch=…."
            f"{taken if state.step > step + 1 else ''}"
        )


def batches(
    dataset: MapDataset,
    state: State,
    *,
    rank: int,
    world_size: int,
    batch_size: int | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Sequence[Any]] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    micro_batch: int | None = None,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    device: torch.device = CPU,
    pin_memory: bool = False,
    gradient_weight: GradientWeight | None = None,
    equal_parts: bool = False,
    on_turn: Callable[[Any, int], None] = refuse_uncommitted,
    progress: DataProgress | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    **limits: Unpack[LoopOptions],
) -> Iterator[Batch]:
    """Yield this rank's part of each step from `state.step` on. See `Job.batches`; `limits`: those of `turns.Loop`.

    `on_turn` is called with the state and the step when a turn has ended, before the next batch is loaded. With
    `equal_parts`, a batch that the ranks cannot share out equally raises MisuseValueError.
    """
    micro_batch = at_most("micro_batch", micro_batch)
    micro_sizes(1, micro_batch)  # raises for an invalid one at the first call, not in the loop
    loop = Loop(progress, state.step, epochs=epochs, steps=steps, **limits)
    order = _Order(dataset, batch_size, sampler, batch_sampler, drop_last=drop_last, seed=seed, shuffle=shuffle)
    at = loop.placed(order.numbers(loop.commits))
    collate, begin = collate or default_collate, (loop.progress.first_epoch, at.begin, loop.commits)
    reader = Reader(dataset, collate, order.plan, rank, world_size, seed=seed, shuffle=shuffle, at=begin)
    turns = loop.regular(order.plan) if order.regular else loop.listed(order.of, shared_out(rank, world_size, seed))
    taken = loop.run(turns, reader, num_workers=num_workers, pin_memory=pin_memory, device=device)
    with contextlib.closing(taken):  # type: ignore[type-var]  # a generator
        for turn, step, indices, data in taken:
            if equal_parts:
                refuse_unequal(turn.size, world_size, step)
            batch = Batch(
                data=data,
                indices=indices,
                step=step,
                epoch=turn.epoch,
                global_size=turn.size,
                part=step - turn.step,
                last_of_epoch=turn.last and step - turn.step == loop.commits - 1,
                micro_batch=micro_batch,
                cut_somewhere=micro_batch is not None and most_of(turn.size, world_size) > micro_batch,
                gradient_weight=gradient_weight,
                own_collate=reader.own_collate,
            )
            if gradient_weight is not None:
                gradient_weight.take(batch.weight, batch)
            yield batch
            on_turn(state, step)


def refuse_unequal(size: int, world_size: int, step: int) -> None:
    if size % world_size:
        raise MisuseValueError(
            f"step {step}: {size} samples for {world_size} ranks: sharding averages the means of all ranks alike, so "
            "parts of unequal sizes would weigh wrongly. Take a batch_size that they share equally, and drop_last=True"
        )


class _Order:
    """The global batches of each epoch. Raises MisuseTypeError or MisuseValueError for what gives none."""

    def __init__(
        self,
        dataset: Any,
        batch_size: Any,
        sampler: Any,
        batch_sampler: Any,
        *,
        drop_last: bool,
        seed: int,
        shuffle: bool,
    ) -> None:
        if batch_sampler is not None and (batch_size is not None or sampler is not None or drop_last):
            raise MisuseTypeError("job.batches: batch_sampler excludes batch_size, sampler and drop_last")
        if batch_sampler is None and batch_size is None:
            raise MisuseTypeError("job.batches: a batch_size, of all ranks together, or a batch_sampler")
        self.regular = sampler is None and batch_sampler is None
        self.plan = plan_of(dataset, 1 if batch_size is None else batch_size, drop_last=drop_last and self.regular)
        self._sampler = sampler if batch_sampler is None else batch_sampler
        self._batched, self._drop_last, self._seed, self._shuffle = batch_sampler is not None, drop_last, seed, shuffle
        refuse_shares(self._sampler)

    def numbers(self, commits: int) -> dict[str, Any]:
        """What a position depends on."""
        numbers = {"samples": self.plan.samples, "seed": self._seed, "commits": commits}
        if not self._batched:
            numbers |= {"batch_size": self.plan.batch_size, "drop_last": self._drop_last}
        return numbers | ({"shuffle": self._shuffle} if self.regular else {"sampler": type(self._sampler).__name__})

    def of(self, epoch: int, most: float) -> tuple[Sequence[Sequence[Any]], dict[str, Any]]:
        """See `Loop.listed`."""
        name, samples, size = type(self._sampler).__name__, self.plan.samples, self.plan.batch_size
        most = most if self._batched else most * size
        indices = bounded(self._sampler, self._seed, epoch, most=most, samples=samples)
        if self._batched:
            batches: Sequence[Sequence[Any]] = whole_indices(indices, name)
        else:
            batches = cut_up(whole_indices([indices], name)[0], size, drop_last=self._drop_last)
        return batches, {"order": order_hash(batches)}
