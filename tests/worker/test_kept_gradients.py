"""Gradients that a script keeps over `job.commit` are lost in a failure: they are named, and only they."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elastic.worker.checks.kept_gradients import LOOKS
from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.state.state import State


class Loop:
    def __init__(self, **more: nn.Module) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
        self.state = State(model=self.net, optimizer=torch.optim.SGD(self.net.parameters(), lr=0.1), **more)
        self.state.watch_optimizers(self.job.guard())
        self.enter()

    def enter(self, generation: int = 1) -> None:
        self.job.enter(rank=0, world_size=1, generation=generation, checkpoint_scheduler=None, state=self.state)
        self.state.forget_gradients()
        self.state.begin()

    def backward(self) -> None:
        self.net(torch.ones(2, 4)).mean().backward()

    def commit(self) -> None:
        self.job.commit(self.state)

    def accumulate(self, turns: int, *, every: int) -> None:
        for _ in range(turns):
            self.backward()
            if (self.state.step + 1) % every == 0:
                self.state.optimizer.step()
                self.state.optimizer.zero_grad()
            self.commit()


def test_gradients_that_wait_for_a_later_step_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.accumulate(12, every=3)
    said = capsys.readouterr().err
    assert said.count("gradients are kept over job.commit()") == 1
    assert "micro_batch" in said, "the fix"


def test_what_a_failure_has_lost_of_them_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.accumulate(10, every=4)
    capsys.readouterr()
    loop.enter(generation=2)
    assert "the gradients of steps 9 to 10" in capsys.readouterr().err
    loop.accumulate(2, every=4)
    loop.enter(generation=3)
    assert not capsys.readouterr().err, "they were applied"


def test_steps_that_are_done_again_lose_no_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.accumulate(10, every=4)
    capsys.readouterr()
    loop.state.__dict__["_step"] = 8  # back to a snapshot
    loop.enter(generation=2)
    assert not capsys.readouterr().err


def zero_first(loop: Loop) -> None:
    loop.state.optimizer.zero_grad()
    loop.backward()


def zero_before_the_backward(loop: Loop) -> None:
    loss = loop.net(torch.ones(2, 4)).mean()
    loop.state.optimizer.zero_grad(set_to_none=False)
    loss.backward()


def zero_last(loop: Loop) -> None:
    loop.backward()
    loop.state.optimizer.zero_grad()


def by_hand(loop: Loop) -> None:
    for parameter in loop.net.parameters():
        parameter.grad = None
    for _ in range(2):  # micro-batches
        loop.backward()


@pytest.mark.parametrize("turn", [zero_first, zero_before_the_backward, zero_last, by_hand])
def test_gradients_of_a_step_that_was_skipped_are_not_kept_by_a_loop_that_drops_them(
    turn: Callable[[Loop], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a GradScaler that has found an infinity."""
    loop = Loop()
    for _ in range(LOOKS + 2):
        turn(loop)
        loop.commit()
    loop.enter(generation=2)
    assert not capsys.readouterr().err
    assert not any(parameter._backward_hooks for parameter in loop.net.parameters()), "no cost for ever"


class Gan:
    """Its scaler finds infinities in the first turns, and its generator's backward comes first."""

    def __init__(self, *, every: int, drops: bool = True) -> None:
        torch.manual_seed(0)
        self.made, self.told = nn.Linear(4, 4), nn.Linear(4, 1)
        self.job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
        first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.made, self.told))
        self.state = State(made=self.made, told=self.told, first=first, second=second)
        self.state.watch_optimizers(self.job.guard())
        self.every, self.drops = every, drops
        self.job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None, state=self.state)
        self.state.begin()

    def turn(self, *, skips: bool, closure: bool = False) -> None:
        def backward() -> torch.Tensor:
            if self.drops:
                self.state.second.zero_grad()
            loss = (self.told(x) - self.told(self.made(x).detach())).mean()
            loss.backward()
            return loss

        x = torch.rand(2, 4)
        self.state.first.zero_grad()
        self.told(self.made(x)).mean().backward()
        if not skips:
            self.state.first.step()
        if self.state.step % self.every == 0:
            if closure:
                self.state.second.step(backward)
            else:
                backward()
            if not skips and not closure:
                self.state.second.step()
        self.job.commit(self.state)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_a_gan_whose_generator_comes_first_keeps_no_gradients(
    every: int, closure: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    gan = Gan(every=every)
    for number in range(12):
        skips = number in (0, 1, 4)
        gan.turn(skips=skips, closure=closure and not skips)
    assert not capsys.readouterr().err


def test_one_that_never_drops_them_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    gan = Gan(every=3, drops=False)
    for number in range(8):
        gan.turn(skips=number < 2)
    assert capsys.readouterr().err.count("gradients are kept over job.commit()") == 1


@pytest.mark.parametrize("every", [2, 3, 2 * LOOKS])
def test_they_are_named_when_an_optimizer_applies_them(every: int, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.accumulate(every - 1, every=every)
    assert not capsys.readouterr().err
    loop.accumulate(1, every=every)
    assert "gradients are kept over job.commit()" in capsys.readouterr().err


def test_a_module_outside_the_optimizer_that_gathers_gradients_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """As the fixed model of a perceptual loss."""
    fixed = nn.Linear(1, 1)
    loop = Loop(fixed=fixed)
    for number in range(3 * LOOKS):
        loop.state.optimizer.zero_grad()
        fixed(loop.net(torch.ones(2, 4))).mean().backward()
        if number % 5:
            loop.state.optimizer.step()
        loop.commit()
    assert not capsys.readouterr().err
    assert not fixed.weight._backward_hooks, "no cost for ever"
