"""An optimizer's attributes that nothing keeps are named; torch's own optimizers have none that change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from elastic.worker.state.state import State

OWN = [
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adafactor", "ASGD", "Rprop", "Adamax"]
]


class Kron(torch.optim.SGD):
    """As PSGD's: it decides at random when its preconditioner is updated."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rng, self.calls, self.probability = random.Random(1), torch.tensor(0), 0.5

    def step(self, closure: Any = None) -> Any:
        self.rng.random()
        self.calls += 1
        return super().step(closure)


def committed(optimizer: Any, capfd: pytest.CaptureFixture[str]) -> str:
    net = nn.Linear(2, 2)
    state = State(model=net, optimizer=optimizer(net.parameters()))
    state.begin()
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.committed(1)
    return capfd.readouterr().err


def test_attributes_that_change_in_its_steps_are_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    said = committed(Kron, capfd)
    assert said.count("state.optimizer.calls, state.optimizer.rng changes in the optimizer's steps") == 1
    assert "probability" not in said


@pytest.mark.parametrize("optimizer", OWN)
def test_torchs_own_optimizers_have_none(optimizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert committed(optimizer, capfd) == ""


def test_nor_does_a_schedule_give_them_one(capfd: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(model=net, optimizer=optimizer, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    state.begin()
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.schedule.step()
        state.committed(1)
    assert capfd.readouterr().err == ""


class Unwatched(torch.optim.SGD):
    """Attributes without a version or a state to compare."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        with torch.inference_mode():
            self.table = torch.zeros(2)
        self.rng = random.SystemRandom()


def test_an_attribute_that_cannot_be_compared_ends_no_commit(capfd: pytest.CaptureFixture[str]) -> None:
    assert committed(Unwatched, capfd) == ""
