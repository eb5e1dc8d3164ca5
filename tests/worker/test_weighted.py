"""`job.weighted`: every token weighs the same, however tokens and samples are spread over ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

CPU = torch.device("cpu")
IGNORED = -100


class Texts(torch.utils.data.Dataset[Any]):
    """Of 1 to 6 tokens, padded; one has none that counts."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> Any:
        generator = torch.Generator().manual_seed(i)
        labels = torch.randint(0, 5, (6,), generator=generator)
        labels[0 if i == 3 else 1 + i % 6 :] = IGNORED
        return torch.randn(6, 4, generator=generator, dtype=torch.float64), labels


def loss_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch.x).flatten(0, 1)
    return F.cross_entropy(logits, batch.y.flatten(), ignore_index=IGNORED, reduction="sum")


def tokens(batch: Any) -> torch.Tensor:
    return (batch.y != IGNORED).sum()


def train(job: Job, how: str, batch_size: int) -> list[list[float]]:
    """The gradient of each step. `plain` steps in between must be as without `weighted`."""
    torch.manual_seed(0)
    state = State(model=nn.Linear(4, 5).double())
    state.begin()
    model = job.ddp(state.model)
    found = []
    for batch in job.batches(Texts(), state, batch_size=batch_size, steps=4, shuffle=False, micro_batch=2):
        state.model.zero_grad()
        if state.step == 2:
            for part in batch.parts():
                model(part.x).square().mean().backward()
        elif how == "twice":  # two losses, each with a backward that exchanges
            for share in (0.25, 0.75):
                job.weighted(share * loss_sum(model, batch), tokens(batch)).backward()
        elif how == "whole":
            job.weighted(loss_sum(model, batch), tokens(batch)).backward()
        else:
            total = job.total(tokens(batch))
            for part in batch.parts():
                job.weighted(loss_sum(model, part), total=total).backward()
        found.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]).tolist())
        job.commit(state)
    return found


def wanted(batch_size: int) -> list[list[float]]:
    """In one process, with the whole batch at a time."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    found = []
    data = Texts()
    start = 0
    for step in range(4):
        stop = min(start + batch_size, len(data))
        x, y = (torch.stack(column) for column in zip(*(data[i] for i in range(start, stop)), strict=True))
        start = stop % len(data)
        model.zero_grad()
        if step == 2:
            model(x).square().mean().backward()
        else:
            count = (y != IGNORED).sum().clamp(min=1)
            (
                F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum") / count
            ).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).tolist())
    return found


def alone() -> Job:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    return job


def close(got: list[list[float]], want: list[list[float]]) -> bool:
    return got == [pytest.approx(step, rel=1e-10, abs=1e-13) for step in want]


@pytest.mark.parametrize("how", ["whole", "parts", "twice"])
def test_tokens_weigh_the_same_without_a_group(how: str) -> None:
    assert close(train(alone(), how, 5), wanted(5))


def test_no_token_at_all_is_a_loss_of_zero() -> None:
    assert alone().weighted(torch.zeros(()), 0).item() == 0.0


def test_a_total_below_one_is_taken_as_it_is() -> None:
    job = Job(name="j", device=CPU, local_rank=0, link=Link())
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
    assert job.weighted(torch.tensor(0.5), 0.25).item() == 2.0


def test_half_precision_does_not_round_the_number_of_tokens() -> None:
    loss = alone().weighted(torch.tensor(257.0, dtype=torch.bfloat16), 257)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(256 / 257, rel=1e-6)


def test_count_and_total_exclude_each_other() -> None:
    for given in ({}, {"count": 1, "total": torch.ones(())}):
        with pytest.raises(TypeError, match=r"either count, .* or total="):
            alone().weighted(torch.ones(()), **given)  # type: ignore[arg-type]


CASES = [("whole", 5), ("parts", 7), ("whole", 2), ("twice", 5), ("twice", 2)]


def on_ranks(rank: int, world_size: int, port: int) -> Any:
    group = formed(rank, world_size, port)
    job = Job(name="j", device=CPU, local_rank=rank, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None)
    found = {f"{how} {size}": train(job, how, size) for how, size in CASES}
    group.close()
    return found


@pytest.mark.slow
def test_tokens_weigh_the_same_for_any_world_size() -> None:
    """With batches of 2 samples, rank 2 has none."""
    for world_size in (2, 3):
        for found in run_ranks(on_ranks, world_size=world_size):
            for how, size in CASES:
                assert close(found[f"{how} {size}"], wanted(size)), (how, size)
