"""What a script gives to `batches`: checked, and refused by its name with the way out."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypedDict

from torch.utils.data import DataLoader, Dataset

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

from .sharding import BatchPlan


class LoopOptions(TypedDict, total=False):
    """Those of every loop with steps and epochs."""

    commits: int
    allow_changed: bool


class StepsOptions(LoopOptions, total=False):
    seed: int


class ReadOptions(TypedDict, total=False):
    """Those of `Job.evaluate`."""

    seed: int
    num_workers: int
    collate: Callable[[list[Any]], Any] | None
    pin_memory: bool


class BatchOptions(LoopOptions, ReadOptions, total=False):
    shuffle: bool
    drop_last: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Sequence[Any]] | None
    micro_batch: int | None


class StreamOptions(TypedDict, total=False):
    seed: int
    num_workers: int
    collate: Callable[[list[Any]], Any] | None
    keep_every: int
    micro_batch: int | None


def refuse_unknown(method: Callable[..., Any], options: Collection[str], known: Collection[str]) -> None:
    """`options` of a method of the job. Raises MisuseTypeError naming the first that is not known, and the nearest."""
    for name in options:
        if name not in known:
            own = inspect.signature(method).parameters.values()
            every = sorted({*known, *(each.name for each in own if each.kind is each.KEYWORD_ONLY)})
            near = difflib.get_close_matches(name, every, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(every)}"
            raise MisuseTypeError(f"job.{method.__name__}({name}=…): no such option; {hint}")


def plan_of(dataset: Any, batch_size: Any, *, drop_last: bool = False) -> BatchPlan:
    """Raises TypeError for data that has no samples by their number, or a `batch_size` that is no whole number;
    ValueError for an empty dataset or batch."""
    if isinstance(dataset, DataLoader):
        raise MisuseTypeError(
            "the dataset is a DataLoader, which takes a rank's samples in its own order: give its dataset, and its "
            "batch_size (here that of all ranks together), num_workers and collate to job.batches"
        )
    one = getattr(type(dataset), "__getitem__", Dataset.__getitem__)  # torch's own only raises
    by_number = one is not Dataset.__getitem__ or hasattr(dataset, "__getitems__")
    if not by_number or not hasattr(dataset, "__len__"):
        raise MisuseTypeError(
            f"the dataset is {type(dataset).__name__}, without len(dataset) or dataset[i]: data that can only be read "
            "in order is for job.streams"
        )
    return BatchPlan(len(dataset), whole("batch_size", batch_size), drop_last)


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """`value` as an int: numpy's numbers too. Raises TypeError naming it, ValueError below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise MisuseTypeError(f"{name} = {value!r}: a whole number") from None
    if least is not None and number < least:
        raise MisuseValueError(f"{name} = {number}: at least {least}")
    return number


def at_most(name: str, value: Any) -> int | None:
    """A limit; None: there is none. Raises TypeError for what is no whole number, ValueError for a negative one."""
    if value is not None and whole(name, value) < 0:
        raise MisuseValueError(f"{name} = {value}: 0 or more; leave it out for no limit")
    return None if value is None else whole(name, value)
