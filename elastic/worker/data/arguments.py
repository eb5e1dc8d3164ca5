"""What a script gives to `batches`: checked, and refused by its name with the way out."""

from __future__ import annotations

import operator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

from .sharding import BatchPlan


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
