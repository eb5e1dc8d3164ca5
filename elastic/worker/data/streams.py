"""Data that can only be read in order: streams, with torchdata's StatefulDataLoader.

The data consists of a fixed number of streams, independent of the world size. Each step takes the same number of
samples from every stream, and each rank reads a contiguous range of the streams. Every `keep_every` steps all ranks
exchange the positions of their streams (the loaders' own state, a few hundred bytes) and keep them in the job's state,
and so in every checkpoint. After a re-formation or a resume, each rank restores its streams, which may be others than
before, to their kept positions and skips the samples taken since.

Guaranteed: every sample of every stream is taken exactly once and in order, also when the world size changes, if a
stream yields the same samples each time it is read. Not guaranteed: random numbers drawn inside a stream; a stream that
draws must keep its generator in its own ``state_dict``. At the end of a stream, samples that do not fill its part of a
step are left out: the next step begins its next pass.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from elastic.worker.boot.inherited_sockets import process_init
from elastic.worker.comm.ddp import GradientWeight
from elastic.worker.link.misuse import MisuseValueError
from elastic.worker.state.handover import shared_values
from elastic.worker.state.state import State
from elastic.worker.torch_internals import torch_private

from .batches import Batch, refuse_uncommitted
from .columns import joined
from .containers import moved
from .reading import CPU, as_is
from .seeds import seed_turn, word
from .sharding import most_of, rank_range

_END = object()

Make = Callable[[int, int], Iterable[Any]]
"""(stream, count) -> the samples of that stream, in order. An iterable with ``state_dict``/``load_state_dict`` is
restored directly; without them it is read again from its beginning. If it has ``set_epoch`` as well, as those of
`datasets` do, that is called with the number of each further pass."""


def streams(
    make: Make,
    state: State,
    *,
    count: int,
    batch_size: int,
    steps: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    keep_every: int = 50,
    num_workers: int = 0,
    micro_batch: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    device: torch.device = CPU,
    gradient_weight: GradientWeight | None = None,
    on_turn: Callable[[Any, int], None] = refuse_uncommitted,
) -> Iterator[Batch]:
    """Yield this rank's part of each step from `state.step` to `steps`; a stream that ends is started again.

    `batch_size` is the number of samples per step over all ranks, the same number from each of the `count` streams: it
    must be a multiple of `count`, and `count` at least `world_size`. `Batch.indices` number the samples: step ×
    batch_size + position in the global batch. `num_workers`: 0, or any other number for one loader process per stream;
    several would each read the whole stream. `collate`: see `_collates`.

    Raises ValueError for numbers that violate it, for another `count` or `batch_size` than in the steps so far, for a
    stream with fewer samples than a step takes from it and at the end of a generator, TypeError for a stream whose
    state is not JSON, RuntimeError for a turn without a commit, ImportError without torchdata.
    """
    numbers = _checked(count, batch_size, world_size, state)
    first, stop = rank_range(0, count, rank, world_size)
    each = batch_size // count
    reads, together = _collates(collate or default_collate, stop - first)
    readers = {n: _Stream(make(n, count), each, num_workers, reads) for n in range(first, stop)}
    try:
        _put_back(readers, state)
        while (step := state.step) < steps:
            if step % keep_every == 0 and (state.streams is None or state.streams["step"] != step):
                state.streams = {"step": step, **numbers, "states": _exchanged(readers, rank, world_size)}
            data = together([next(stream) for stream in readers.values()], each)
            batch = Batch(
                data=moved(data, device),
                indices=tuple(range(step * batch_size + first * each, step * batch_size + stop * each)),
                step=step,
                epoch=0,
                global_size=batch_size,
                micro_batch=micro_batch,
                cut_somewhere=micro_batch is not None and each * most_of(count, world_size) > micro_batch,
                gradient_weight=gradient_weight,
                own_collate=collate not in (None, default_collate),
            )
            seed_turn(word(seed, 1, step, rank))
            if gradient_weight is not None:
                gradient_weight.take(batch.weight, batch)
            yield batch
            on_turn(state, step)
    finally:
        for stream in readers.values():
            stream.close()


def _collates(
    collate: Callable[[list[Any]], Any], count: int
) -> tuple[Callable[[list[Any]], Any], Callable[[list[Any], int], Any]]:
    """(what is called with a stream's samples, what makes one batch of the results of `count` streams). A function of
    the script's own is called once, here, with the samples of all: only it knows how to join what it makes."""
    if collate is default_collate or count == 1:
        return collate, joined
    return as_is, lambda read, each: collate(list(itertools.chain.from_iterable(read)))


def _checked(count: int, batch_size: int, world_size: int, state: State) -> dict[str, int]:
    """The numbers that the positions of the streams depend on."""
    if batch_size % count:
        raise MisuseValueError(f"batch_size = {batch_size}: must be a multiple of count = {count} streams")
    if world_size > count:
        raise ValueError(f"count = {count} streams: not enough for a world of {world_size}")
    numbers = {"count": count, "batch_size": batch_size}
    for name, number in numbers.items():
        if (kept := (state.streams or {}).get(name, number)) != number:
            raise MisuseValueError(
                f"{name} = {number}: the streams of the steps so far had {name} = {kept}, and their positions fit no "
                "other number; use that again, or begin a new job"
            )
    return numbers


class _Stream:
    """One stream in batches of `each` samples; restarts at its end."""

    def __init__(
        self, samples: Iterable[Any], each: int, num_workers: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError:
            raise ImportError("streams need torchdata: pip install 'elasticd[data]'") from None
        self._pass = 0
        """How often the stream has ended."""
        self._begins: Callable[[int], None] = lambda _: None
        dataset: IterableDataset[Any] = _Counted(samples)
        if hasattr(samples, "state_dict"):
            dataset = _Stateful(samples)
            self._begins = getattr(samples, "set_epoch", self._begins)
        with warnings.catch_warnings():
            # torchdata 0.11 calls a torch function that 2.13 deprecates; the user cannot do anything about it.
            warnings.filterwarnings("ignore", message="'set_vital'")
            self._loader: Any = StatefulDataLoader(
                dataset,
                batch_size=each,
                num_workers=min(num_workers, 1),
                collate_fn=collate,
                drop_last=True,
                worker_init_fn=process_init(),
            )
        self._once = isinstance(samples, Iterator)
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        if (batch := next(self._iterator, _END)) is _END:
            self._pass += 1
            # Without it a stream of `datasets` begins each further pass where it was restored.
            self._begins(self._pass)
            self._iterator = iter(self._loader)
            batch = next(self._iterator, _END)
        if batch is not _END:
            return batch
        if self._once:
            raise MisuseValueError(
                "a stream has ended and is a generator or iterator, which can be read once only: make(stream, count) "
                "must return an iterable that can be read again from its beginning, such as an object whose __iter__ "
                "is the generator function"
            )
        raise MisuseValueError("a stream has fewer samples than one step takes from it")

    def state(self) -> dict[str, Any]:
        return {"pass": self._pass, "loader": self._loader.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._pass = state["pass"]
        if self._pass:  # in the first one the script may have called `set_epoch` itself
            self._begins(self._pass)
        self._loader.load_state_dict(state["loader"])
        self._iterator = None

    def close(self) -> None:
        torch_private.shut_down_workers(self._iterator)
        self._iterator = None


class _Stateful(IterableDataset[Any]):
    """An iterable with its own state, as an IterableDataset."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)

    def state_dict(self) -> dict[str, Any]:
        return self._samples.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._samples.load_state_dict(state)


class _Counted(IterableDataset[Any]):
    """An iterable without its own state: its state is the number of samples taken, and it is read again up to there.

    (torchdata does so too, but 0.11 counts the samples read again a second time.)
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples
        self._taken = 0
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        self._taken, self._skip = self._skip, 0
        for sample in itertools.islice(self._samples, self._taken, None):
            self._taken += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skip = state["taken"]


def _put_back(readers: dict[int, _Stream], state: State) -> None:
    """Bring every stream to its position at `state.step`: from its newest kept state, or from its beginning."""
    kept = state.streams or {"step": 0, "states": {}}
    for number, stream in readers.items():
        if (theirs := kept["states"].get(str(number))) is not None:
            stream.load(theirs)
        for _ in range(state.step - kept["step"]):
            next(stream)


def _exchanged(readers: dict[int, _Stream], rank: int, world_size: int) -> dict[str, Any]:
    """stream -> loader state, of all ranks."""
    states = {str(number): stream.state() for number, stream in readers.items()}
    if world_size == 1:
        return states
    gathered = shared_values.gather(states, rank=rank, world_size=world_size, device=torch.device("cpu"))
    return {number: theirs for part in gathered for number, theirs in part.items()}
