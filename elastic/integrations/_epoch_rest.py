"""A data loader that goes on in the middle of an epoch: without the batches that are committed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch


class Rest:
    """A sampler or loader that leaves its first `skip` items out, the first time that it is iterated."""

    def __init__(self, inner: Any, skip: int) -> None:
        self.inner, self.skip = inner, skip

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return itertools.islice(iter(self.inner), skip, None)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def skipped(dataloader: Any, batches: int) -> Any:
    """`dataloader` without the first `batches` of its next epoch. Where it has indices nothing is read in vain."""
    sampler = getattr(dataloader, "batch_sampler", None)
    stream = isinstance(getattr(dataloader, "dataset", None), torch.utils.data.IterableDataset)
    if type(sampler) is torch.utils.data.BatchSampler and not stream:
        inner = sampler.sampler.inner if isinstance(sampler.sampler, Rest) else sampler.sampler
        whole = len(sampler)
        sampler.sampler = Rest(inner, (batches if batches <= whole else batches % max(1, whole)) * sampler.batch_size)
        return dataloader
    return Rest(dataloader.inner if isinstance(dataloader, Rest) else dataloader, batches)
