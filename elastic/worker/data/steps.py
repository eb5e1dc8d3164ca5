"""A loader of the script's own, step by step: seeded before each draw and each turn, and continued where it was."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import msgspec
from torch.utils.data import DataLoader, IterableDataset

from elastic.worker.boot.inherited_sockets import process_init
from elastic.worker.link.misuse import MisuseValueError
from elastic.worker.state.parts.data_progress import DataProgress
from elastic.worker.state.state import State
from elastic.worker.torch_internals import torch_private

from .arguments import LoopOptions
from .batches import refuse_uncommitted
from .reading import Reader
from .samplers import drawn, set_epoch, whole_indices
from .seeds import seed_everything, seed_turn, word
from .turns import Loop, own

_OPTIONS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
_END = object()


def steps(
    loader: Any,
    state: State,
    *,
    rank: int,
    world_size: int,
    seed: int = 0,
    progress: DataProgress | None = None,
    on_turn: Callable[[Any, int], None] = refuse_uncommitted,
    epochs: int | None = None,
    steps: int | None = None,
    **limits: Unpack[LoopOptions],
) -> Iterator[Any]:
    """Yield what `loader` yields on this rank, from `state.step` on. See `Job.steps`; `limits`: those of `turns.Loop`.

    A DataLoader over a dataset with indices is read by them, without those of the steps so far, and each sample with
    seeds of its own; any other iterable is drawn from up to the step, with the seeds of each draw.
    """
    loop = Loop(progress, state.step, epochs=epochs, steps=steps, **limits)
    numbers = {"loop": "steps", "loader": type(loader).__name__, "seed": seed, "commits": loop.commits}
    at = loop.placed(numbers)
    loop.at = msgspec.structs.replace(at, world=world_size)
    ends = contextlib.ExitStack()
    if _has_indices(loader):
        of = functools.partial(_batches, loader, seed)
        reader = Reader(loader.dataset, loader.collate_fn, seed=seed, rank=rank)
        taken = loop.run(
            loop.listed(of, own(rank, seed)),
            reader,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=functools.partial(_begin_process, loader.worker_init_fn, process_init()),
            **({name: getattr(loader, name) for name in _OPTIONS} if loader.num_workers else {}),
        )
    else:
        draws = _Draws(loader, seed, rank, loop)
        taken = loop.run(draws.turns(), draws, num_workers=0, pin_memory=False)
        ends.callback(draws.close)
    ends.callback(taken.close)  # type: ignore[attr-defined]  # a generator
    with ends:
        for _, step, _, item in taken:
            yield item
            on_turn(state, step)


def _has_indices(loader: Any) -> bool:
    # A class of the script's own may have an `__iter__` of its own.
    batched = type(loader) is DataLoader and loader.batch_sampler is not None
    return batched and not isinstance(loader.dataset, IterableDataset)


def _batches(loader: Any, seed: int, epoch: int, most: float) -> tuple[Sequence[Sequence[Any]], dict[str, Any]]:
    """See `Loop.listed`. The number is equal on all ranks, the samples are not."""
    set_epoch(loader, epoch, seed)
    endless = most < math.inf and not hasattr(loader.sampler, "__len__")
    keys = drawn(loader.batch_sampler, seed, epoch, most if endless else math.inf)
    batches = whole_indices(keys, "its batch_sampler")
    if not batches:
        raise MisuseValueError(f"the loader of job.steps gives no batch in epoch {epoch}")
    return batches, {"length": len(batches)}


def _begin_process(of_the_script: Callable[[int], None] | None, ours: Callable[[int], None], number: int) -> None:
    ours(number)
    if of_the_script is not None:
        of_the_script(number)


class _Draws:
    """Reads an iterable in its order; the key is the number of the draw in the loop's steps."""

    def __init__(self, loader: Any, seed: int, rank: int, loop: Loop) -> None:
        self._loader, self._seed, self._rank, self._loop = loader, seed, rank, loop
        self._item: Any = _END
        self._iterator: Any = None
        if getattr(loader, "num_workers", 0) and loader.worker_init_fn is None:
            loader.worker_init_fn = process_init()

    def turns(self) -> Iterator[Any]:
        length = None
        if not isinstance(getattr(self._loader, "dataset", None), IterableDataset):  # its length need not be true
            length = len(self._loader) if hasattr(self._loader, "__len__") else None
        yield from self._loop.drawn(self._begin, self._draw, length)

    def _begin(self, epoch: int) -> Callable[[], Any]:
        """An iterator of the loader's `epoch`."""
        set_epoch(self._loader, epoch, self._seed)
        self._iterator = iterator = iter(self._loader)
        if iterator is self._loader:
            self._loop.progress.refuse_again(iterator)
        return functools.partial(next, iterator, _END)

    def close(self) -> None:
        torch_private.shut_down_workers(self._iterator)
        self._iterator = None

    def _draw(self, take: Callable[[], Any], step: int) -> bool:
        """Draw the next item. Returns whether there was one."""
        seed_everything(self._seed, 4, step, self._rank)
        self._item = take()
        return self._item is not _END

    def __getitem__(self, key: int, /) -> tuple[tuple[int, ...], Any]:
        return (), self._item

    def seed_loop(self, step: int) -> None:
        seed_turn(word(self._seed, 1, step, self._rank))
