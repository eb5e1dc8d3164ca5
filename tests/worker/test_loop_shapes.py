"""Each loop that docs/loop.md shows, killed at every line: the weights are those of the undisturbed run."""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.killed import compiled, run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, WeightedRandomSampler

import elastic
from elastic.worker.job.job import Job

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "loop.md"
SECTION = PAGE.read_text().partition("## The shapes of loops")[2].partition("\n## ")[0]
BLOCKS = {
    f"{title.partition(':')[0]} {number}": block
    for title, _, text in (part.partition("\n") for part in SECTION.split("\n### ")[1:])
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
SAMPLES = 150


class Noisy(TensorDataset):
    """Draws at random for each sample, from all three generators."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.rand(()) + 0.1 * random.random(), y


class Buckets:
    """Batches of samples of like length, in an order drawn at random."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], random.random()))
        batches = [order[start : start + 20 + start % 7] for start in range(0, len(order) - 27, 40)]
        random.shuffle(batches)
        yield from batches


def data(size: int, seed: int) -> Noisy:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return Noisy(x, x.sum(1, keepdim=True).sin())


class Environment:
    """Has a state, and draws from a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.at, self.generator = torch.zeros(4), torch.Generator().manual_seed(rank)

    def rollout(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.at = 0.9 * self.at + torch.randn(8, 4, generator=self.generator)
        return self.at, self.at.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, held: dict[str, torch.Tensor]) -> None:
        self.at = held["at"].clone()
        self.generator.set_state(held["generator"])


def setup(job: Job) -> elastic.State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
    critic = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    return elastic.State(
        model=model,
        critic=CriticOf(critic),
        optimizer=optimizer,
        critic_optimizer=torch.optim.SGD(critic.parameters(), 0.05, momentum=0.9),
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        best=1e9,
        scores=[],
        held=None,
    )


class CriticOf(nn.Module):
    """Of inputs of any width: their mean."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.mean(1, keepdim=True))


def script(block: str) -> dict[str, Any]:
    train_set, val_set = data(SAMPLES, 1), data(40, 2)
    names: dict[str, Any] = {
        "F": F, "DataLoader": DataLoader, "DistributedSampler": DistributedSampler,
        "WeightedRandomSampler": WeightedRandomSampler, "Buckets": Buckets, "Environment": Environment,
        "train_set": train_set, "val_set": val_set,
        "weights": [1.0 + i % 3 for i in range(SAMPLES)], "lengths": [i % 11 for i in range(SAMPLES)],
        "folds": [(Subset(train_set, range(90)), Subset(train_set, range(90, 150))),
                  (Subset(train_set, range(60, 150)), Subset(train_set, range(60)))],
        "first_weights": {k: v.clone() for k, v in setup(None).model.state_dict().items()},  # type: ignore[arg-type]
        "get_batch": lambda step: (torch.randn(8, 4), torch.rand(8, 1) + random.random()),
    }  # fmt: skip
    return compiled(BLOCKS[block] + MEASURE, names)


MEASURE = """
_train = train

def train(job, state):
    global measure
    measure = lambda batch: {"loss": F.mse_loss(state.model(batch.x), batch.y, reduction="sum")}
    _train(job, state)
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For so small tensors several cost more than they save, and much more on a machine under load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_page_shows_them() -> None:
    assert len(BLOCKS) == 10, list(BLOCKS)


def differing(block: str, every: int) -> list[str]:
    """The places of which each `every`-th one is tried, where a kill makes a difference."""
    names = script(block)
    whole, killer = run(setup, names)
    assert killer.places > 30
    found = []
    for at in range(0, killer.places, every):
        for replaced in (False, True):
            got, there = run(setup, names, at=at, replaced=replaced)
            assert there.where, "not killed"
            if got != whole:
                found.append(f"{there.where} (place {at}), {'replacement' if replaced else 'survivor'}")
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_a_kill_at_some_places_changes_nothing(block: str) -> None:
    assert differing(block, 11) == []


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS)
def test_a_kill_at_any_place_changes_nothing(block: str) -> None:
    assert differing(block, 1) == []
