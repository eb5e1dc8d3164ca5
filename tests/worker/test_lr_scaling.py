"""`job.lr_scale`: rates follow the world size, and nothing of it is left in the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic.worker.job.job import Job
from elastic.worker.job.lr_scaling import factor
from elastic.worker.link.link import Link
from elastic.worker.state.state import State


@pytest.mark.parametrize(
    ("mode", "world_size", "base", "want"),
    [("none", 8, 2, 1.0), ("linear", 8, 2, 4.0), ("linear", 1, 4, 0.25), ("sqrt", 8, 2, 2.0), ("sqrt", 3, 3, 1.0)],
)
def test_the_factor_is_a_function_of_world_size_and_base(mode: Any, world_size: int, base: int, want: float) -> None:
    assert factor(mode, world_size, base) == want


@pytest.mark.parametrize(("mode", "base"), [("square", 2), ("linear", 0), ("linear", 1.5), ("sqrt", True)])
def test_wrong_arguments_are_named(mode: Any, base: Any) -> None:
    with pytest.raises(ValueError, match=f"job.lr_scale: (mode = 'square'|base_world_size = {base})"):
        factor(mode, 2, base)


def build() -> tuple[Job, State]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)  # each rate from the one before
    state = State(model=model, optimizer=optimizer, scheduler=scheduler)
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
    state.watch_optimizers(job.guard())
    return job, state


def enter(job: Job, state: State, world_size: int, generation: int) -> None:
    job.enter(rank=0, world_size=world_size, generation=generation, checkpoint_scheduler=None)
    state.begin()


def step(job: Job, state: State) -> None:
    state.optimizer.zero_grad()
    state.model(torch.full((2, 4), state.step + 1.0)).sum().backward()
    state.optimizer.step()
    state.scheduler.step()
    job.commit(state)


def rates(state: State) -> list[float]:
    return [group["lr"] for group in state.optimizer.param_groups]


def test_each_step_uses_the_scaled_rate_and_the_state_keeps_its_own() -> None:
    """World 4, then 2, then 4 again, each entered twice: as if the rates had been multiplied by hand for each step."""
    job, state = build()
    _, other = build()
    for generation, world_size in enumerate([4, 4, 2, 2, 4], 1):
        enter(job, state, world_size, generation)
        assert job.lr_scale(state.optimizer, mode="linear", base_world_size=2) == world_size / 2
        job.lr_scale(state.optimizer, mode="linear", base_world_size=2)  # a second call replaces the first
        step(job, state)
        kept = rates(other)
        for group, rate in zip(other.optimizer.param_groups, kept, strict=True):
            group["lr"] = rate * (world_size / 2)
        other.optimizer.zero_grad()
        other.model(torch.full((2, 4), float(generation))).sum().backward()
        other.optimizer.step()
        for group, rate in zip(other.optimizer.param_groups, kept, strict=True):
            group["lr"] = rate
        other.scheduler.step()
        assert rates(state) == rates(other)
        assert torch.equal(state.model.weight, other.model.weight)


def test_a_new_generation_without_the_call_uses_the_states_rates() -> None:
    job, state = build()
    enter(job, state, 4, 1)
    job.lr_scale(state.optimizer, mode="linear", base_world_size=2)
    enter(job, state, 4, 2)
    seen = []
    state.optimizer.register_step_pre_hook(lambda *_: seen.append(rates(state)))
    step(job, state)
    assert seen == [[0.1, 0.3]]


def test_an_optimizer_that_is_named_twice_is_scaled_once() -> None:
    job, state = build()
    enter(job, state, 4, 1)
    job.lr_scale(state.optimizer, state.optimizer, mode="linear", base_world_size=2)
    before = state.model.bias.detach().clone()
    step(job, state)
    assert (before - state.model.bias).item() == pytest.approx(0.3 * 2 * 2)  # rate × factor × gradient


def test_a_step_that_raises_does_not_compound() -> None:
    job, state = build()
    enter(job, state, 4, 1)
    job.lr_scale(state.optimizer, mode="linear", base_world_size=2)
    seen = []

    def closure() -> Any:
        seen.append(rates(state))
        raise KeyError("no such sample")

    for _ in range(2):
        with pytest.raises(KeyError):
            state.optimizer.step(closure)
    assert seen == [[0.2, 0.6]] * 2
    assert state.rewind() is None
    enter(job, state, 4, 2)
    assert rates(state) == [0.1, 0.3]
