"""Snapshots for memory alone: when they are taken, what each rank keeps, and where the memory for them ends."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.arenas import Agent

from elastic.checkpoint import interval as checkpoint_interval
from elastic.checkpoint.format.shard_plan import beside_shards
from elastic.checkpoint.interval import IntervalPlan, IntervalRule
from elastic.checkpoint.memory.free_memory import available_nbytes, plenty
from elastic.checkpoint.saving.saver import Saver
from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.reasons import Code, codes
from elastic.contract.worker import messages
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.handover.restore import HeldSnapshots
from elastic.worker.state.state import State


def build(seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)), torch.nn.BatchNorm1d(4))
    return State(model=model)


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    made = [Agent() for _ in range(5)]
    yield made
    for agent in made:
        for arena in agent.arenas:
            arena.close()


def schedulers(agents: list[Agent], rule: IntervalRule | None, nodes: tuple[int, ...]) -> list[CheckpointScheduler]:
    """One for each rank; `nodes` has as many as it runs, each."""
    places = [(index, count) for count in nodes for index in range(count)]
    made = []
    for rank, (index, count) in enumerate(places):
        scheduler = CheckpointScheduler(AgentSnapshots(agents[rank]), rule, shared=True, snapshots=True)  # type: ignore[arg-type]
        scheduler.enter(RankPosition(rank, len(places), index, count), 0)
        made.append(scheduler)
    return made


def test_the_first_commit_is_kept_without_any_checkpoint(agents: list[Agent]) -> None:
    state = build()
    (scheduler,) = schedulers(agents, None, (1,))
    state.committed(1)
    scheduler.after(state)
    (filled,) = agents[0].filled
    assert (filled.step, filled.save) == (1, False)
    scheduler.finish(state)
    assert len(agents[0].filled) == 1, "nothing is written at the end"


def test_the_first_commit_of_each_generation_is_kept(agents: list[Agent]) -> None:
    state = build()
    (scheduler,) = schedulers(agents, None, (1,))
    for _ in range(3):
        state.committed(1)
        scheduler.after(state)
    scheduler.enter(RankPosition(0, 1, 0, 1), 3)
    state.committed(2)
    scheduler.after(state)
    assert [(filled.generation, filled.step) for filled in agents[0].filled] == [(1, 1), (2, 4)]


def test_memory_snapshots_do_not_disturb_checkpoints(agents: list[Agent]) -> None:
    state = build()
    (scheduler,) = schedulers(agents, IntervalRule(every_steps=10), (1,))
    for _ in range(20):
        state.committed(1)
        scheduler.after(state)
    assert [filled.step for filled in agents[0].filled if filled.save] == [10, 20]
    assert next(filled.step for filled in agents[0].filled if not filled.save) == 1


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (3, 1), (1, 3, 1)])
def test_each_node_has_all_of_it(agents: list[Agent], nodes: tuple[int, ...]) -> None:
    """And each shard is written by one rank alone."""
    state, written = build(1), []
    for scheduler in schedulers(agents, IntervalRule(every_steps=1), nodes):
        scheduler._put(state, save=True)
    first = 0
    for count in nodes:
        arenas = [next(a for a in agent.arenas if a.header().complete) for agent in agents[first : first + count]]
        written += [info.name for arena in arenas for info in arena.table()]
        newcomer = build(2)
        HeldSnapshots(arenas).load(newcomer)
        for (info, here), (_, there) in zip(state.tensors(), newcomer.tensors(), strict=True):
            assert torch.equal(here, there), info.name
        first += count
    assert sorted(written) == sorted(info.name for info in state.table())


def test_snapshot_with_scarce_memory_keeps_the_shard_to_be_written(agents: list[Agent]) -> None:
    state, agent = build(), agents[0]
    asked: list[messages.NeedArena] = []
    send = agent.send

    def scarce(message: messages.Message) -> None:
        if isinstance(message, messages.NeedArena):
            asked.append(message)
            agent.no_memory = message.optional
        send(message)

    agent.send = scarce  # type: ignore[method-assign]
    scheduler = schedulers(agents, IntervalRule(every_steps=3), (1, 1))[0]
    assert not scheduler._put(state, save=False)
    assert scheduler._put(state, save=True)
    assert [message.optional for message in asked] == [True, False], "and the agent is not asked each time"
    (filled,) = agent.filled
    assert filled.save
    assert agent.arenas[filled.buffer].beside().table == ()
    assert scheduler.policy.skipped == 0


def test_the_plan_names_the_step_at_which_a_snapshot_is_due() -> None:
    plan = IntervalPlan(save_at=105, agree_at=110)

    def keep_at(interval_s: float, since_s: float) -> tuple[int, int]:
        found = checkpoint_interval.with_snapshot(plan, interval_s, step=100, step_s=0.1, since_s=since_s)
        assert found.save_at == 105
        return found.keep_at, found.agree_at

    assert keep_at(15.0, 14.65) == (104, 110)
    assert keep_at(15.0, 14.0) == (110, 110)
    assert keep_at(15.0, 13.95) == (111, 111), "in place of the exchange one step before"
    assert keep_at(15.0, 13.85) == (0, 110)
    assert keep_at(1.0, 9.0) == (101, 110), "overdue"


def test_snapshot_due_while_all_buffers_are_busy_is_taken_once_one_is_free(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("elastic.worker.snapshots.checkpoint_scheduler.time", clock)
    state = build()
    (scheduler,) = schedulers(agents, None, (1,))
    monkeypatch.setattr("elastic.worker.snapshots.snapshot_policy.SnapshotCost.seconds", 0.5)  # every 100 s
    monkeypatch.setattr("elastic.worker.snapshots.snapshot_policy.SnapshotCost.warm", True)
    busy_until_s = 150.0
    monkeypatch.setattr(scheduler._backend, "free", lambda: not 50.0 < now[0] < busy_until_s)
    kept_at_s = []
    while now[0] < 300.0:
        now[0] += 0.5
        state.committed(1)
        before = len(agents[0].filled)
        scheduler.after(state)
        kept_at_s += [now[0]] * (len(agents[0].filled) - before)
    first, second, third = kept_at_s
    assert first == 0.5
    assert busy_until_s <= second <= busy_until_s + 2.0
    assert 100.0 <= third - second <= 102.0


@pytest.mark.parametrize("nodes", [(1,), (2, 2), (3, 1), (1, 4, 2)])
def test_ranks_of_a_node_divide_the_shards_of_other_nodes(nodes: tuple[int, ...]) -> None:
    world_size, first = sum(nodes), 0
    for count in nodes:
        held = [k for part in range(count) for k in beside_shards(first + part, world_size, part, count)]
        assert sorted([*held, *range(first, first + count)]) == list(range(world_size))
        first += count


class Told:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.saver = Saver(
            Checkpoint(),
            "job",
            lambda worker_id, message, fds: self.told.append((message, fds)),
            lambda outcome: None,
        )


@pytest.mark.parametrize("reported", [True, False])
def test_rollback_drops_memory_only_snapshots(reported: bool) -> None:
    """Also that of a worker that has died before it could report it."""
    told = Told()
    told.saver.need_arena(0, 1, 4096)
    for buffer, (step, save) in enumerate(((10, True), (12, False))):
        arena = told.saver._slots[0].arenas[buffer]
        arena.layout(())
        arena.fill([])
        arena.seal(step, 1)
        message = messages.Filled(
            generation=1, step=step, buffer=buffer, nbytes=0, shard=0, shards=1, stall_s=0.0, save=False
        )
        if save or reported:
            told.saver.filled(0, message, lead=True, world_size=1)
        if save:
            told.saver._slots[0].to_disk[buffer] = (1, step)  # as if it were written
    assert told.saver.last.kept_step == (12 if reported else 10)
    told.saver.ask_kept(1, 2)
    told.saver.ask_kept(1, 3, saved=True)
    assert [len(fds) for message, fds in told.told if isinstance(message, messages.InMemorySnapshot)] == [1, 1]
    assert [arena.header().step for arena in told.saver._complete_snapshot()] == [10]
    told.saver.close()


def test_memory_that_the_training_may_need_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plenty(10, available_nbytes=20)
    assert not plenty(11, available_nbytes=20)
    assert plenty(11, available_nbytes=None)
    found = available_nbytes()
    assert found is None or found > 0
    told = Told()
    monkeypatch.setattr("elastic.checkpoint.saving.saver.available_nbytes", lambda: 10_000)
    told.saver.need_arena(0, 1, 4096, optional=True)
    assert told.told == [(messages.Arena(nbytes=0), ())]
    assert Code.LEAVES_TOO_LITTLE in codes(told.saver.last.kept_interval)
    told.saver.need_arena(0, 1, 4096)
    assert len(told.told) == 3
    told.saver.close()


def test_the_limit_of_a_cgroup_counts(tmp_path: Any) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:     1000 kB\n")
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/outer/inner\n")
    asked = {"meminfo": tmp_path / "meminfo", "groups": tmp_path / "groups", "own": tmp_path / "own"}
    for folder, limit in ((inner, "max"), (inner.parent, "600000")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("500000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 20000\n")
    assert available_nbytes(**asked) == 120_000
    (inner.parent / "memory.max").write_text("max\n")
    assert available_nbytes(**asked) == 1_024_000


@pytest.mark.parametrize("step_s", [0.017, 0.028, 0.061, 0.11])
def test_a_snapshot_each_second_needs_one_exchange_each_second(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(
        "elastic.worker.snapshots.checkpoint_scheduler.time", types.SimpleNamespace(monotonic=lambda: round(now[0], 6))
    )
    state = build()
    (scheduler,) = schedulers(agents, None, (1,))
    exchanges = 0
    while now[0] < 20.0:
        now[0] += step_s
        state.committed(1)
        exchanges += now[0] > 5.0 and scheduler.exchanges_at(state.step)
        scheduler.after(state)
    assert len(agents[0].filled) in range(18, 23)
    assert exchanges in range(13, 18)


def test_a_long_step_does_not_put_off_an_exchange() -> None:
    plan = checkpoint_interval.with_snapshot(IntervalPlan(agree_at=101), 1.0, step=100, step_s=5.0, since_s=0.0)
    assert plan == IntervalPlan(keep_at=101, agree_at=101)
    plan = checkpoint_interval.with_snapshot(IntervalPlan(agree_at=101), 9.0, step=100, step_s=5.0, since_s=0.0)
    assert plan == IntervalPlan(agree_at=101)
