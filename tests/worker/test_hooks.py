"""What `train` makes of the objects of the state, which outlive it: hooks and schedulers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

import elastic
from elastic.worker.state.parts.parts import inner_optimizers
from elastic.worker.state.state import State
from elastic.worker.torch_internals import torch_private


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def count(state: State) -> int:
    """Hooks in all: of modules, parameters and optimizers."""
    objects: list[Any] = [*state.model.modules(), *state.model.parameters()]
    for each in state.optimizers():
        objects += [each, *(inner for _, inner in inner_optimizers(each))]
    return sum(len(hooks) for each in objects for _, hooks in torch_private.hooks_of(each))


def nothing(*_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_hooks_of_setup_are_there_at_each_entry_and_no_others(wrapped: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_forward_hook(nothing)
    gone = model[0].weight.register_hook(nothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=Lookahead(optimizer) if wrapped else optimizer)
    state.forget_gradients()
    before = count(state)
    model(torch.randn(4, 2)).sum().backward()
    state.optimizer.step()  # from here on elastic listens to an optimizer within it
    own = count(state)
    gone.remove()
    model.register_forward_pre_hook(nothing, with_kwargs=True)
    model.register_full_backward_hook(nothing)
    model[1].register_state_dict_post_hook(nothing)
    for param in model.parameters():
        param.register_hook(nothing)
        param.register_post_accumulate_grad_hook(nothing)
    for each in (optimizer, state.optimizer):
        each.register_step_pre_hook(nothing)
        each.register_step_post_hook(nothing)
    assert count(state) > own >= before
    state.forget_gradients()
    assert count(state) == own
    assert gone.id in (model[0].weight._backward_hooks or {})


def test_a_gradient_hook_that_was_put_back_is_not_called() -> None:
    model = nn.Linear(2, 1)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        state.forget_gradients()
        model.weight.register_hook(lambda gradient: gradient * 2)
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[2.0, 2.0]]


def plateau(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return functools.partial(ReduceLROnPlateau(optimizer).step, 1.0)


def decay(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return StepLR(optimizer, 1).step


@pytest.mark.parametrize("make", [plateau, decay])
def test_a_schedule_made_in_train_is_refused_by_name_when_it_steps(make: Callable[..., Callable[[], None]]) -> None:
    steps = 0

    def setup(job: elastic.Job) -> State:
        net = nn.Linear(2, 1)
        return State(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))

    def train(job: elastic.Job, state: State) -> None:
        nonlocal steps
        advance = make(state.optimizer)
        while state.step < 5:
            state.model(torch.ones(1, 2)).sum().backward()
            state.optimizer.step()
            advance()
            job.commit(state)
            steps = state.step

    with pytest.raises(RuntimeError, match=r"steps the learning rates .*State\(…, scheduler="):
        elastic.run(setup, train)
    assert steps <= 1


def test_schedules_of_the_state_of_other_optimizers_and_those_that_never_step_are_let_alone() -> None:
    class Held:
        def __init__(self, made: Any) -> None:
            self.list = [made]

        def state_dict(self) -> dict[str, Any]:
            return {"held": self.list[0].last_epoch}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def setup(job: elastic.Job) -> State:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sequence = SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], milestones=[2])
        return State(model=net, optimizer=optimizer, schedule=sequence, other=Held(StepLR(optimizer, 1)))

    def train(job: elastic.Job, state: State) -> None:
        apart = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        others = StepLR(apart, 1)
        unused = StepLR(state.optimizer, 1)
        while state.step < 5:
            state.model(torch.ones(1, 2)).sum().backward()
            state.optimizer.step()
            apart.step()
            for each in (state.schedule, state.other.list[0], others):
                each.step()
            job.commit(state)
        assert unused.last_epoch == 0

    assert elastic.run(setup, train).step == 5
