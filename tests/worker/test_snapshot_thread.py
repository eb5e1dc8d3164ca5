"""Snapshots of a state on the CPU: a thread copies them beside the next forward and backward."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.arenas import Agent
from support.ckpt import table_of

from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.interval import IntervalRule
from elastic.checkpoint.memory import fill as fill_module
from elastic.checkpoint.memory import memcpy
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.fill import Fill
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.state import State

LIMIT_S = 60.0
"""For what happens at once, also on a machine that is busy."""


class Copying:
    """The copying thread, which `let` allows one more memmove at a time; other threads are never held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._move = ctypes.memmove
        self._may = threading.Semaphore(0)
        self.free = False
        self.asked = threading.Semaphore(0)
        self.began = threading.Event()
        self.done = 0
        monkeypatch.setattr(fill_module, "WORTH_A_THREAD_BYTES", 1)
        monkeypatch.setattr(memcpy, "_CHUNK_BYTES", 4096)
        monkeypatch.setattr(ctypes, "memmove", self._held)

    def _held(self, to: int, start: int, nbytes: int) -> None:
        beside = threading.current_thread().name == "elastic-copy"
        if beside:
            self.began.set()
            if not self.free:
                assert self._may.acquire(timeout=LIMIT_S)
        self._move(to, start, nbytes)
        self.done += beside

    def let(self, count: int = 1) -> None:
        self._may.release(count)

    def hold(self) -> None:
        self._may = threading.Semaphore(0)
        self.free = False

    def let_all(self) -> None:
        self.free = True
        self._may.release(10_000)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    made = Copying(monkeypatch)
    yield made
    made.let_all()


class Training:
    """The real thing, but for the group: a model with buffers, an optimizer, the guard, the scheduler, the backend."""

    def __init__(self, agent: Agent, every: int = 1) -> None:
        torch.manual_seed(3)
        self.agent = agent
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = State(model=self.model, optimizer=self.optimizer, seen=torch.zeros(3))
        self.scheduler = CheckpointScheduler(AgentSnapshots(agent), IntervalRule(every_steps=every), shared=True)  # type: ignore[arg-type]
        self.scheduler.enter(RankPosition(0, 1, 0, 1), 0)
        self.job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
        self.job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=self.scheduler)  # type: ignore[arg-type]
        self.state.watch_optimizers(self.job.guard())
        self.truth: dict[int, dict[str, torch.Tensor]] = {}

    def compute(self) -> None:
        """A forward, which changes the buffers, and a backward."""
        loss = self.model(torch.randn(16, 32)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.state.seen = self.state.seen + 1

    def apply(self) -> None:
        self.optimizer.step()

    def commit(self) -> None:
        self.truth[self.state.step + 1] = {info.name: t.clone() for info, t in self.state.tensors()}
        self.job.commit(self.state)

    def one_step(self) -> None:
        self.compute()
        self.apply()
        self.commit()

    def whole(self) -> list[int]:
        """Steps of the whole snapshots, each of which is bit by bit the state as it was committed."""
        steps = []
        for arena in self.agent.arenas:
            if (header := arena.header()).complete:
                steps.append(header.step)
                there = arena.tensors()
                assert there.keys() == self.truth[header.step].keys()
                for name, tensor in self.truth[header.step].items():
                    assert torch.equal(there[name], tensor), f"{name} is not of step {header.step}"
        return sorted(steps)


def test_thread_snapshot_is_the_committed_state_at_any_thread_progress(agent: Agent, copying: Copying) -> None:
    """The forward changes buffers, the optimizer everything else; the thread gets on by some chunks meanwhile."""
    training = Training(agent)
    for step in range(1, 20):
        copying.let(1 + step % 7)
        training.compute()
        rest = threading.Timer(0.01 * (step % 2), copying.let_all)  # before the guard, or while it waits
        rest.start()
        training.apply()
        rest.join(LIMIT_S)
        if step > 1:
            assert training.whole()[-1] == step - 1
            agent.wrote()
        copying.hold()
        training.commit()
    assert [message.step for message in agent.filled] == list(range(1, 19))


def test_the_optimizer_waits_for_the_thread(agent: Agent, copying: Copying) -> None:
    training = Training(agent)
    training.one_step()
    assert copying.began.wait(LIMIT_S)
    assert training.whole() == []
    training.compute()
    before = training.model[0].weight.detach().clone()
    seen: list[bool] = []
    training.optimizer.register_step_pre_hook(lambda *_: seen.append(bool(training.whole())))
    stepping = threading.Thread(target=training.apply)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert torch.equal(training.model[0].weight, before)
    assert agent.filled == []
    copying.let_all()
    stepping.join(LIMIT_S)
    assert seen == [True]
    assert not torch.equal(training.model[0].weight, before)
    assert [message.step for message in agent.filled] == [1]


def test_thread_snapshot_interrupted_by_an_abort_is_dropped(agent: Agent, copying: Copying) -> None:
    training = Training(agent)
    training.one_step()
    assert copying.began.wait(LIMIT_S)
    leaving = threading.Thread(target=training.scheduler.leave)
    leaving.start()
    copying.let()  # the chunk under way
    leaving.join(LIMIT_S)
    assert not leaving.is_alive()
    assert copying.done == 1
    for _, tensor in training.state.tensors():
        tensor.fill_(77)  # what another rank sends, in the next generation
    training.scheduler.settle()
    assert (agent.filled, training.whole()) == ([], [])
    copying.let_all()
    training.scheduler.enter(RankPosition(0, 1, 0, 1), 1)
    training.one_step()
    training.one_step()
    training.scheduler.settle()
    training.scheduler.leave()
    assert training.whole()[-1] == 3


def test_thread_snapshot_complete_at_the_abort_counts(agent: Agent, copying: Copying) -> None:
    copying.let_all()
    training = Training(agent)
    training.one_step()
    backend: Any = training.scheduler._backend
    for thread in backend._buffers._copying[1]._memcpy._threads:
        thread.join(LIMIT_S)
    training.scheduler.leave()
    assert training.whole() == [1]


def test_at_the_end_of_training_it_is_completed(agent: Agent, copying: Copying) -> None:
    training = Training(agent, every=1000)
    training.one_step()
    copying.let_all()
    training.scheduler.finish(training.state)
    assert training.whole() == [1]


@pytest.mark.parametrize("through_data", [False, True])
def test_thread_snapshot_is_dropped_after_an_unannounced_change_and_later_ones_complete(
    agent: Agent, copying: Copying, through_data: bool
) -> None:
    """Averaged weights swapped in for a look at them, say, and back again."""
    training = Training(agent)
    training.one_step()
    assert copying.began.wait(LIMIT_S)
    weight = training.model[2].weight
    held = weight.detach().clone()
    changed = weight.data if through_data else weight.detach()
    changed.mul_(2)
    if not through_data:
        changed.copy_(held)
    copying.let_all()
    with pytest.warns(UserWarning, match=r"no snapshot of step 1: a tensor was changed .* state\.changing\(\)"):
        training.scheduler.settle()
    assert training.whole() == []
    changed.copy_(held)
    training.apply()
    training.commit()
    assert training.whole() == [2], "without a thread from now on"


def test_thread_snapshot_detects_a_tensor_swapped_during_the_copy_and_back(agent: Agent, copying: Copying) -> None:
    training = Training(agent)
    training.one_step()
    weight = training.model[2].weight
    held = weight.detach().clone()
    weight.data.mul_(2)
    copying.let_all()
    backend: Any = training.scheduler._backend
    for thread in backend._buffers._copying[1]._memcpy._threads:
        thread.join(LIMIT_S)
    weight.data.copy_(held)
    with pytest.warns(UserWarning, match="no snapshot of step 1"):
        training.scheduler.settle()
    assert training.whole() == []


def test_a_thread_that_dies_leaves_no_snapshot(agent: Agent, copying: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # it would be printed
    monkeypatch.setattr(memcpy.Memcpy, "_beside", lambda self: self._left.popleft() and 1 / 0)
    training = Training(agent)
    training.one_step()
    with pytest.raises(RuntimeError, match="a thread that copied a snapshot has died"):
        training.scheduler.settle()
    training.scheduler.settle()
    assert (agent.filled, training.whole()) == ([], [])


def test_without_a_thread_to_spare_the_guard_copies(
    agent: Agent, copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    training = Training(agent)
    training.one_step()
    training.compute()
    training.apply()
    assert training.whole() == [1]


def test_a_small_state_takes_no_thread(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise AssertionError("a thread for a few kilobytes")

    monkeypatch.setattr(threading.Thread, "start", refused)
    training = Training(agent)
    training.one_step()
    assert training.whole() == [1]


def test_thread_snapshot_does_not_wait_for_an_abandoned_copy(copying: Copying) -> None:
    held = {"a": torch.full((4096,), 1.0)}
    arena = Arena.create(arena_nbytes(table_of(held)), warm=False)
    arena.layout(table_of(held))
    first: Fill = arena.fill(list(held.values()))
    assert copying.began.wait(LIMIT_S)
    timer = threading.Timer(0.05, copying.let)
    timer.start()
    arena.clear()
    timer.join()
    assert copying.done == 1
    assert not first.done
    copying.let_all()
    arena.fill([torch.full((4096,), 2.0)]).finish()
    arena.seal(2, 1)
    assert bool((arena.tensors()["a"] == 2).all())
    arena.close()
