"""State reaches every rank that lacks it, bit for bit: real processes, real sockets."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn

from elastic.worker.group import Group
from elastic.worker.state import State
from elastic.worker.sync import synchronise

pytestmark = pytest.mark.slow


class Odd(nn.Module):
    """Tied, bf16, non-contiguous, zero-dimensional, empty, boolean, complex."""

    def __init__(self, seed: int, width: int = 40) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.coarse = nn.Parameter(torch.randn(33, 7, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(600, 700).t())
        self.channels = nn.Parameter(torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.rand(17) > 0.5)
        self.register_buffer("phase", torch.randn(5, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wide = self.head(self.embed(tokens)).sum() * self.scale
        return wide + self.coarse.float().sum() + (self.turned**2).sum() + self.channels.sum() + self.nothing.sum()


def build(seed: int, kind: str = "adamw") -> State:
    model = Odd(seed)
    optimizer: torch.optim.Optimizer
    match kind:
        case "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1))
        case "fused":
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        case "capturable":
            optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True)
        case _:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5])
    return State(model=model, optimizer=optimizer, scheduler=scheduler, best=float("inf"), names=("a", {1: [seed]}))


def step(state: State, generation: int) -> None:
    generator = torch.Generator().manual_seed(state.step)
    state.optimizer.zero_grad()
    state.model(torch.randint(0, 50, (3, 4), generator=generator)).backward()
    state.optimizer.step()
    state.scheduler.step()
    state.best = min(state.best, float(state.step))
    state.committed(generation)


def fingerprint(state: State) -> str:
    hasher = hashlib.sha256(repr(state.extra()).encode())
    for info, tensor in state.tensors():
        hasher.update(repr(info).encode())
        flat = tensor.contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def group(rank: int, world: int, port: int, generation: int) -> Group:
    made = Group(backend="gloo", rank=rank, world=world, store_host="127.0.0.1", store_port=port, generation=generation)
    made.form()
    return made


def newcomer(rank: int, world: int, port: int, kind: str) -> Any:
    """Rank 1 has trained three steps, rank 2 as well; 0 and 3 are new."""
    state = build(rank, kind)
    if rank in (1, 2):
        same = build(1, kind)
        state = same
        for _ in range(3):
            step(state, generation=4)
    kept = [id(p) for p in state.model.parameters()], [p.data_ptr() for p in state.model.parameters()]
    made = group(rank, world, port, 5)
    synced = synchronise(state, rank=rank, world=world, generation=5)
    now = [id(p) for p in state.model.parameters()], [p.data_ptr() for p in state.model.parameters()]
    received = fingerprint(state)
    step(state, generation=5)
    made.close()
    return {
        "step": synced.step,
        "source": synced.source,
        "nbytes": synced.nbytes,
        "received": received,
        "after": fingerprint(state),
        "kept": kept == now,
        "tied": state.model.head.weight is state.model.embed.weight,
        "best": state.best,
        "names": repr(state.names),
        "version": state.version,
    }


@pytest.mark.parametrize("kind", ["adamw", "fused", "capturable", "sgd"])
def test_newcomers_get_bit_identical_state_and_step_on_alike(kind: str) -> None:
    results = run_ranks(newcomer, world=4, kind=kind)
    assert [r["step"] for r in results] == [3] * 4
    assert {r["source"] for r in results} == {"live"}
    assert len({r["received"] for r in results}) == 1
    assert len({r["after"] for r in results}) == 1
    assert all(r["kept"] and r["tied"] for r in results)
    assert results[1]["nbytes"] == results[2]["nbytes"] == 0 < results[0]["nbytes"] == results[3]["nbytes"]
    assert {r["names"] for r in results} == {"('a', {1: [1]})"}
    assert {tuple(r["version"]) for r in results} == {(5, 4)}
