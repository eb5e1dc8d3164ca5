"""A state of several element sizes (BatchNorm counts in int64, a layer in bfloat16) comes back from memory and disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.arenas import Agent

from elastic.checkpoint.interval import IntervalRule
from elastic.checkpoint.saving.write import commit, write_shard
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.handover.restore import Disk, HeldSnapshots
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
    return State(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), best=None, seen=torch.arange(3), level=0.5
    )


def saved(agents: list[Agent], *, nodes: int = 1, only_on: int | None = None) -> list[State]:
    """The ranks' states after step 1, half of it in each agent's memory. Rank `only_on` alone keeps weights."""
    states = []
    for rank, agent in enumerate(agents):
        states.append(state := build(1))
        for p in state.model.parameters():
            p.grad = torch.ones_like(p)
        state.optimizer.step()
        if rank == only_on:
            state.best = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        state.committed(1)
        scheduler = CheckpointScheduler(
            AgentSnapshots(agent), IntervalRule(every_steps=1), shared=True, snapshots=nodes > 1
        )  # type: ignore[arg-type]
        here = len(agents) // nodes
        scheduler.enter(RankPosition(rank, len(agents), rank % here, here), 0)
        scheduler._put(state, save=True)
        scheduler.settle()
    return states


def same(one: State, other: State) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs) and one.extra() == other.extra()


@pytest.mark.parametrize("only_on", [None, 0, 1])
def test_from_the_memory_of_the_agents(agents: list[Agent], only_on: int | None) -> None:
    """Values come from one rank, where the ranks have others: the first of the node."""
    states, newcomer = saved(agents, only_on=only_on), build(2)
    HeldSnapshots([arena for agent in agents for arena in agent.arenas if arena.header().complete]).load(newcomer)
    assert newcomer.version == (1, 1)
    assert same(states[0], newcomer)


@pytest.mark.parametrize("only_on", [None, 0, 1])
def test_from_the_memory_of_one_of_two_nodes(agents: list[Agent], only_on: int | None) -> None:
    states = saved(agents, nodes=2, only_on=only_on)
    for agent, state in zip(agents, states, strict=True):
        HeldSnapshots([arena for arena in agent.arenas if arena.header().complete]).load(newcomer := build(2))
        assert same(state, newcomer)


@pytest.mark.parametrize("only_on", [None, 0, 1])
def test_from_disk(agents: list[Agent], tmp_path: Path, only_on: int | None) -> None:
    states, newcomer = saved(agents, only_on=only_on), build(2)
    for agent in agents:
        write_shard(next(arena for arena in agent.arenas if arena.header().complete), str(tmp_path), "job")
    commit(str(tmp_path), "job", step=1, generation=1, shards=2, world_size=2)
    Disk(str(tmp_path), "job").load(newcomer)
    assert same(states[0], newcomer)
