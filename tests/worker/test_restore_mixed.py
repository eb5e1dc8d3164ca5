"""A state of several element sizes (BatchNorm counts in int64, a layer in bfloat16) comes back from memory and disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.arenas import Agent

from elastic.checkpoint.interval import IntervalRule
from elastic.checkpoint.write import commit, write_shard
from elastic.worker.agent_snapshots import AgentSnapshots
from elastic.worker.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.restore import Disk, HeldSnapshots
from elastic.worker.state.state import State


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """One for each rank."""
    made = [Agent(), Agent()]
    yield made
    for agent in made:
        for arena in agent.arenas:
            arena.close()


def build(seed: int) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8).bfloat16(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)
    )
    return State(model=model, optimizer=torch.optim.AdamW(model.parameters()), seen=torch.arange(3), level=0.5)


def saved(agents: list[Agent]) -> State:
    """Step 1, half of it in each agent's memory."""
    state = build(1)
    for p in state.model.parameters():
        p.grad = torch.ones_like(p)
    state.optimizer.step()
    state.committed(1)
    for rank, agent in enumerate(agents):
        keeper = CheckpointScheduler(AgentSnapshots(agent), IntervalRule(every_steps=1), shared=True)  # type: ignore[arg-type]
        keeper.enter(RankPosition(1, rank, len(agents), rank, len(agents)), 0)
        keeper._put(state, save=True)
        keeper.settle()
    return state


def same(one: State, other: State) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs) and one.extra() == other.extra()


def test_from_the_memory_of_the_agents(agents: list[Agent]) -> None:
    state, newcomer = saved(agents), build(2)
    HeldSnapshots([arena for agent in agents for arena in agent.arenas if arena.header().whole]).load(newcomer)
    assert newcomer.version == (1, 1)
    assert same(state, newcomer)


def test_from_disk(agents: list[Agent], tmp_path: Path) -> None:
    state, newcomer = saved(agents), build(2)
    for agent in agents:
        write_shard(next(arena for arena in agent.arenas if arena.header().whole), str(tmp_path), "job")
    commit(str(tmp_path), "job", step=1, generation=1, shards=2, world_size=2)
    Disk(str(tmp_path), "job").load(newcomer)
    assert same(state, newcomer)
