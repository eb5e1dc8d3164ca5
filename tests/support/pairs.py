"""A small dataset of pairs (x, y), the same in every process."""

from __future__ import annotations

from typing import Any

import torch


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return x, x.sum().reshape(1)


def columns(size: int) -> Any:
    """(x, y) of the first `size` samples."""
    return tuple(torch.stack(column) for column in zip(*(Pairs()[i] for i in range(size)), strict=True))
