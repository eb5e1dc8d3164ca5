"""Snapshots of a state on a GPU, on one that is not there (`support.fake_cuda`): they run beside the steps, and what is
taken for whole is always the state of one committed step, to the last byte."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.arenas import Agent
from support.fake_cuda import Broken, Device, gpu  # noqa: F401 - a fixture

from elastic.checkpoint.interval import IntervalRule
from elastic.checkpoint.memory.arena import Fullness
from elastic.contract.worker.tensor_table import Table, TensorInfo
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.session import GenerationEnded
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.state import State

SIZE = 64


def newest(agent: Agent) -> int:
    """Step of the newest whole snapshot, all of whose bytes are of that step. -1: there is none."""
    found = -1
    for arena in agent.arenas:
        if (header := arena.header()).complete:
            for name, tensor in arena.tensors().items():
                assert bool((tensor == header.step).all()), f"{name} is not of step {header.step}: {tensor}"
            found = max(found, header.step)
    return found


class Trained:
    """A state on the device, each byte of which tells the step, as far as the scheduler asks."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.step, self.version = 0, (1, 0)
        self.held = {name: torch.zeros(SIZE) for name in ("w1", "w2", "momentum", "running_mean")}
        self._there = {name: device.tensor(tensor) for name, tensor in self.held.items()}

    def clean(self) -> bool:
        return True

    def tensors(self, extra: dict[str, Any] | None = None) -> list[tuple[TensorInfo, torch.Tensor]]:
        if extra is not None:
            extra.update(self.extra())
        return [(TensorInfo(name, "F32", (SIZE,), SIZE * 4), t.detach()) for name, t in self._there.items()]

    def table(self) -> Table:
        return tuple(info for info, _ in self.tensors())

    def volatile(self) -> set[str]:
        return {"running_mean"}

    def extra(self) -> dict[str, Any]:
        return {"step": self.step}

    def refuse_growth(self, *_: object) -> None: ...

    def forward(self) -> None:
        mean, to = self.held["running_mean"].data, self.step + 1
        self.device.launch("forward", lambda: mean.fill_(to))

    def optimize(self) -> None:
        """What an optimizer does after its hook: bumps the versions at once, changes the bytes when the device can."""
        for name in ("w1", "w2", "momentum"):
            torch._C._increment_version([self._there[name]])
            late = functools.partial(self.held[name].data.fill_, self.step + 1)
            self.device.launch("optimizer", late)


def scheduler_for(agent: Agent, every: int = 1) -> CheckpointScheduler:
    scheduler = CheckpointScheduler(AgentSnapshots(agent), IntervalRule(every_steps=every), shared=True)  # type: ignore[arg-type]
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    return scheduler


def one_step(state: Trained, scheduler: CheckpointScheduler, pause: Callable[[], None] = lambda: None) -> None:
    pause()
    state.forward()
    pause()
    scheduler.settle()  # what the guard does
    state.optimize()
    pause()
    state.step += 1
    scheduler.after(state)  # type: ignore[arg-type]


def test_the_step_only_begins_the_copy(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent)
    one_step(state, scheduler)
    gpu.log.clear()
    one_step(state, scheduler)
    assert gpu.log == [
        "forward",
        "host waits",  # for the snapshot of the step before: the optimizer must not overtake it
        *["optimizer"] * 3,
        "side waits",  # until the optimizer is through
        "copy", "event on side", "main waits",  # the next forward may change it
        "copy", "copy", "copy", "event on side",
    ]  # fmt: skip
    assert [m.step for m in agent.filled] == [1]
    assert sorted(arena.header().state for arena in agent.arenas) == [Fullness.FILLING, Fullness.COMPLETE]
    scheduler.settle()
    assert [m.step for m in agent.filled] == [1, 2]
    assert newest(agent) == 2


def test_gpu_snapshot_marked_whole_is_one_committed_step_in_any_device_order(gpu: Device, agent: Agent) -> None:  # noqa: F811
    """At any moment anything that is queued may have run, or not; a death could come at each."""
    state, scheduler = Trained(gpu), scheduler_for(agent)
    chance = random.Random(11)

    def pause() -> None:
        gpu.drift(chance)
        assert newest(agent) == (agent.filled[-1].step if agent.filled else -1)

    for _ in range(200):
        if agent.unwritten and chance.random() < 0.7:
            agent.wrote()
        one_step(state, scheduler, pause)
    assert len(agent.filled) > 100
    assert scheduler.policy.skipped > 0  # both buffers were in use at times


def test_at_the_end_of_training_it_is_completed(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent, every=1000)
    one_step(state, scheduler)
    scheduler.finish(state)  # type: ignore[arg-type]
    assert newest(agent) == 1


def test_gpu_snapshot_in_progress_is_completed_at_the_end(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent)
    one_step(state, scheduler)
    assert agent.filled == []
    scheduler.finish(state)  # type: ignore[arg-type]
    assert [m.step for m in agent.filled] == [1]


def test_gpu_snapshot_is_whole_before_a_stopped_rank_leaves(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent)
    agent.stop_wanted = True
    with pytest.raises(GenerationEnded, match="stopped at step 1, which is saved"):
        one_step(state, scheduler)
    assert newest(agent) == 1


def test_gpu_snapshot_interrupted_by_an_abort_holds_the_old_state(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent)
    one_step(state, scheduler)
    scheduler.leave()
    for tensor in state.held.values():
        tensor.fill_(77)  # what another rank sends, in the next generation
    gpu.main.synchronize()
    assert [m.step for m in agent.filled] == [1]
    assert newest(agent) == 1


def test_gpu_snapshot_is_dropped_if_the_device_fails_during_the_abort(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent)
    one_step(state, scheduler)
    one_step(state, scheduler)
    agent.wrote()
    gpu.broken = True
    scheduler.leave()
    assert [m.step for m in agent.filled] == [1]
    assert newest(agent) == 1


def test_the_device_fails_before_the_optimizer(gpu: Device, agent: Agent) -> None:  # noqa: F811
    """The script hears of it, as from any CUDA call, and a snapshot is never taken for whole later on."""
    state, scheduler = Trained(gpu), scheduler_for(agent)
    one_step(state, scheduler)
    one_step(state, scheduler)
    gpu.broken = True
    with pytest.raises(Broken):
        scheduler.settle()
    gpu.broken = False
    scheduler.settle()
    assert [m.step for m in agent.filled] == [1]
    assert newest(agent) == 1


def test_gpu_snapshot_is_dropped_after_an_unannounced_change(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent)
    one_step(state, scheduler)
    one_step(state, scheduler)
    agent.wrote()
    state._there["w1"].add_(5)  # averaged weights swapped in for a look at them, say
    with pytest.warns(UserWarning, match=r"no snapshot of step 2: a tensor was changed .* state\.changing\(\)"):
        scheduler.settle()
    state.held["w1"].fill_(2)
    assert newest(agent) == 1
    one_step(state, scheduler)
    scheduler.settle()
    assert newest(agent) == 3


def test_a_commit_without_a_step_of_an_optimizer_settles_too(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent, every=10)
    for _ in range(10):
        one_step(state, scheduler)
    assert agent.filled == []
    scheduler.after(state)  # type: ignore[arg-type]
    assert [m.step for m in agent.filled] == [10]


def test_buffers_come_and_are_registered_while_training_goes_on(gpu: Device, agent: Agent) -> None:  # noqa: F811
    state, scheduler = Trained(gpu), scheduler_for(agent, every=5)
    for _ in range(2):
        one_step(state, scheduler)
    scheduler._backend._prepared()  # type: ignore[attr-defined]
    assert len(gpu.pinned) == len(agent.arenas) == 2
    first = agent.arenas
    for _ in range(4):
        one_step(state, scheduler)
    assert agent.arenas is first
    assert newest(agent) == 5
    scheduler._backend._buffers.arenas[0].close()  # type: ignore[attr-defined]
    assert len(gpu.pinned) == 1


def test_without_memory_training_goes_on(gpu: Device, agent: Agent) -> None:  # noqa: F811
    agent.no_memory = True
    state, scheduler = Trained(gpu), scheduler_for(agent, every=5)
    for _ in range(6):
        one_step(state, scheduler)
    assert (agent.filled, scheduler.policy.skipped) == ([], 1)


def test_memory_that_cuda_will_not_register_serves_all_the_same(gpu: Device, agent: Agent) -> None:  # noqa: F811
    gpu.refuses_to_pin = 801
    state, scheduler = Trained(gpu), scheduler_for(agent)
    with pytest.warns(UserWarning, match=r"snapshots block the training step: .* \(CUDA error 801\)"):
        one_step(state, scheduler)
    scheduler.settle()
    assert newest(agent) == 1


# ── which call settles ────────────────────────────────────────────────────────────────────────────────────────


class Settles:
    def __init__(self) -> None:
        self.log: list[str] = []

    def exchanges_at(self, step: int) -> bool:
        return False

    def after(self, state: State, *, keep: bool, digest: int) -> bool:
        return False

    def settle(self) -> None:
        self.log.append("settled")


class FakeLink(Link):
    def __init__(self, log: list[str]) -> None:
        self.log, self.over = log, False

    def applying(self) -> None:
        if self.over:
            raise GenerationEnded("a rank died")
        self.log.append("asked")


def test_the_optimizers_guard_settles_before_the_first_byte_changes() -> None:
    scheduler = Settles()
    link = FakeLink(scheduler.log)
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=link)  # type: ignore[arg-type]
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=scheduler)
    model = torch.nn.Linear(2, 2)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    state.watch_optimizers(job.guard())
    before = model.weight.detach().clone()
    state.optimizer.register_step_pre_hook(lambda *_: scheduler.log.append(f"same {torch.equal(before, model.weight)}"))
    model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    assert scheduler.log == ["asked", "settled", "same True"]
    assert not torch.equal(before, model.weight)
    state.changing()  # for code that changes them without an optimizer
    assert scheduler.log[3:] == ["asked", "settled"]
    link.over = True
    state.committed(1)
    with pytest.raises(GenerationEnded):
        state.optimizer.step()
    assert scheduler.log[5:] == []
    assert state.clean()


def test_late_copy_is_limited_to_optimizer_parameters_and_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(False)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.Adam([*model[0].parameters(), *model[1].parameters()], lr=torch.tensor(0.1))
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    state = State(model=model, optimizer=optimizer, averaged=averaged, seen=torch.zeros(3))
    late = {info.name for info, _ in state.tensors()} - state.volatile()
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert late == {f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")} | {
        f"optimizer.state.{i}.{kind}" for i in range(4) for kind in kinds
    }
