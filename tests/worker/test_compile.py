"""torch.compile: a survivor that enters `train` again does not compile again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic.worker.job import Job
from elastic.worker.standalone import NoLink
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
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=NoLink())
    state.watch_optimizers(job.guard())
    for generation in (1, 2, 3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            job.enter(rank=0, world_size=1, generation=generation, keeper=None)
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
