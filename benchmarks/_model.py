"""Model and data of the jobs that benchmarks kill: about 10 MB of parameters, and samples that cost no time."""

from __future__ import annotations

import torch
from torch import nn

EVERY = 20
"""Steps from one checkpoint to the next, where there are any."""
WIDTH = 512


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """100,000 samples out of 1,000 points: made in no time, so that a start is a start and not the making of data."""

    def __init__(self) -> None:
        self.x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index % 1000], self.y[index % 1000]


def network() -> nn.Module:
    torch.manual_seed(0)
    inner: list[nn.Module] = []
    for _ in range(10):
        inner += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(nn.Linear(32, WIDTH), *inner, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
