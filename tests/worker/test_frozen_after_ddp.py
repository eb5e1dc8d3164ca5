"""Parameters that want no gradients any more after `job.ddp` has wrapped their model: the exchange waits for them."""

from __future__ import annotations

import pytest
import torch
from support.forming import formed
from support.pairs import Pairs
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn
from worker.test_gradient_weight import alone, loss

FROZEN = r"0\.weight, 0\.bias.* of a model were frozen .* after job\.ddp .* freeze them before job\.ddp"


def frozen(rank: int, world_size: int, port: int, how: str) -> tuple[str, int, float]:
    """(what was refused, the step reached, the other layer's weight)."""
    group = formed(rank, world_size, port)
    job, state, _, _ = alone(rank, world_size)
    net = nn.Sequential(*(nn.Linear(4, size, dtype=torch.float64) for size in (4, 4, 1)))
    stops = nn.ModuleList((net[0], net[2]) if how == "ends" else (net[0],))
    for number, param in enumerate(net.parameters()):
        nn.init.constant_(param, 0.1 * number)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: job.guard()())
    options = {"find_unused_parameters": True} if how == "unused" else {}
    if how == "before":
        stops.requires_grad_(False)
    model = job.ddp(net, **options)
    said = ""
    try:
        for batch in job.batches(Pairs(), state, batch_size=8, steps=3):
            stops.requires_grad_(state.step < 1 and how != "before")
            if state.step == 2 and how != "unused":
                model = job.ddp(net)  # stock DDP would notice at a next forward; a new wrapper does not
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            job.commit(state)
    except RuntimeError as error:
        said = str(error)
    group.close()
    return said, state.step, net[1].weight.sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["after", "ends"])
def test_gradients_that_were_not_exchanged_because_others_were_frozen_are_not_applied(how: str) -> None:
    """As after a recovery of a loop that freezes a part of its model at some step and calls `job.ddp` again there:
    `train` wraps the model first, and the loop freezes that part again after it. `ends`: its first and last layer."""
    (said, step, mine), (other_said, _, other) = run_ranks(frozen, world_size=2, how=how)
    assert (said, step, mine) == (other_said, 1, other)
    with pytest.raises(RuntimeError, match=FROZEN):
        raise RuntimeError(said)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "unused"])
def test_parameters_that_are_frozen_where_the_exchange_knows_it_are_no_error(how: str) -> None:
    (said, step, mine), (_, _, other) = run_ranks(frozen, world_size=2, how=how)
    assert (said, step, mine) == ("", 3, other)


def two_models(rank: int, world_size: int, port: int) -> tuple[str, int]:
    """(what was refused, the step reached) of a generator with a frozen layer, whose forward comes before the critic's
    step."""
    group = formed(rank, world_size, port)
    job, state, _, _ = alone(rank, world_size)
    layers = nn.Sequential(*(nn.Linear(4, size, dtype=torch.float64) for size in (4, 4)))
    generator, critic = job.ddp(layers, find_unused_parameters=True), job.ddp(nn.Linear(4, 1, dtype=torch.float64))
    layers[0].requires_grad_(False)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (critic, generator)]
    for optimizer in steps:
        optimizer.register_step_pre_hook(lambda *_: job.guard()())
    said = ""
    try:
        for batch in job.batches(Pairs(), state, batch_size=8, steps=2):
            made = generator(batch.x)
            for optimizer, made_here in zip(steps, (made.detach(), made), strict=True):
                optimizer.zero_grad()
                critic(made_here).mean().backward()
                optimizer.step()
            job.commit(state)
    except RuntimeError as error:
        said = str(error)
    group.close()
    return said, state.step


@pytest.mark.slow
def test_a_step_between_the_forward_and_the_backward_of_a_model_that_looks_for_unused_parameters_is_no_error() -> None:
    assert run_ranks(two_models, world_size=2) == [["", 2], ["", 2]]
