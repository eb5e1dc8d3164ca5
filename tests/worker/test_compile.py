"""torch.compile: a survivor that enters `train` again does not compile again, and nothing of the old wrapper runs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseRuntimeError
from elastic.worker.state.state import State

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Net(nn.Module):
    """`torch.compile` skips modules of torch's own: only a class of the script's is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sin() + x


@pytest.mark.parametrize("where", ["setup", pytest.param("train", marks=pytest.mark.long)])
def test_entering_train_again_does_not_compile_again(where: str) -> None:
    """`model.compile()` in `setup`, or `torch.compile(job.ddp(model))` in `train`."""
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(generation)
        return graph.forward

    model = Net()
    if where == "setup":
        model.compile(backend=backend)
    state = State(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert not [name for name in model.state_dict() if "_orig_mod" in name], "checkpoints keep their names"
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
    state.watch_optimizers(job.guard())
    for generation in (1, 2, 3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            job.enter(rank=0, world_size=1, generation=generation, checkpoint_scheduler=None)
            state.forget_gradients()
            state.begin()
            wrapped: Any = job.ddp(state.model)
            if where == "train":
                wrapped = torch.compile(wrapped, backend=backend)
            for _ in range(2):
                wrapped(torch.ones(3, 4)).sum().backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
                job.commit(state)
        finally:
            dist.destroy_process_group()
    assert compiled
    assert set(compiled) == {1}


class LostError(Exception):
    """As an all-reduce raises it when a rank is lost."""


def trained(where: str, backend: str, *, aborted: set[int], longer: int) -> list[torch.Tensor]:
    """The model's tensors after three generations of two steps each, of which those `aborted` end within a further
    backward: some gradients were ready for their exchange, others not. `longer`: rows by which batches grow."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    state = State(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
    state.watch_optimizers(job.guard())
    lost = False

    def reached(gradient: torch.Tensor) -> torch.Tensor:
        if lost:
            raise LostError
        return gradient

    model.inner[0].weight.register_hook(reached)

    def train() -> None:
        nonlocal lost
        inner: Any = torch.compile(state.model, backend=backend) if where == "inside" else state.model
        wrapped: Any = job.ddp(inner)
        if where == "around":
            wrapped = torch.compile(wrapped, backend=backend)
        for turn in range(3):
            lost = turn == 2
            if lost and generation not in aborted:
                return
            wrapped(torch.ones(3 + turn * longer, 4)).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            job.commit(state)

    for generation in (1, 2, 3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        job.enter(rank=0, world_size=1, generation=generation, checkpoint_scheduler=None, state=state)
        state.forget_gradients()
        state.begin()
        with contextlib.suppress(LostError):
            train()
        state.rewind()
        dist.destroy_process_group()
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize(
    ("where", "backend"),
    [
        ("around", "eager"),
        ("inside", "eager"),
        pytest.param("around", "aot_eager", marks=pytest.mark.long),
        pytest.param("inside", "aot_eager", marks=pytest.mark.long),
    ],
)
def test_a_rank_lost_within_a_backward_leaves_nothing_in_the_compiled_model(
    where: str, backend: str, longer: int
) -> None:
    """`torch.compile(job.ddp(model))` or `job.ddp(torch.compile(model))`, with batches of one shape or of several."""
    undisturbed = trained("plain", backend, aborted=set(), longer=longer)
    found = trained(where, backend, aborted={1, 2}, longer=longer)
    assert all(map(torch.equal, found, undisturbed))


def test_a_wrapper_of_an_earlier_entry_of_train_is_refused() -> None:
    model = Net()
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=None)
        wrapped = job.ddp(model)
        job.enter(rank=0, world_size=1, generation=2, checkpoint_scheduler=None)
        with pytest.raises(MisuseRuntimeError, match=r"call job\.ddp in train, on each entry"):
            wrapped(torch.ones(3, 4))
    finally:
        dist.destroy_process_group()
