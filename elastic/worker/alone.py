"""``elastic.run`` without an agent: under stock torchrun, or as a plain ``python train.py``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .job import Job
from .state import State
from .sync import synchronise

if TYPE_CHECKING:
    from .run import Setup, Train


class NoLink:
    """Nobody watches."""

    def entered(self) -> None: ...

    def contributed(self) -> None: ...

    def applying(self) -> None: ...

    def quiet(self, limit_s: float) -> None: ...

    def committed(self, step: int, step_s: float, loss: float | None) -> None: ...

    def bad_numbers(self, step: int, kind: str, detail: str, ranks: tuple[int, ...]) -> None:
        raise FloatingPointError(f"{kind} at step {step} on rank {', '.join(map(str, ranks))}: {detail}")

    def check(self, step: int) -> None: ...


def run_alone(setup: Setup, train: Train, *, checkpoint_dir: str | None) -> State:
    """Form torchrun's group if there is one, restore, train."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    grouped = "RANK" in os.environ and not dist.is_initialized()
    if grouped:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    job = Job(name=os.environ.get("TORCHELASTIC_RUN_ID", "alone"), device=device, local_rank=local_rank, link=NoLink())
    job.rank, job.world_size = rank, world
    try:
        state = setup(job)
        state.watch_optimizers(job.guard())
        state.to(device)
        generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
        if world > 1:
            synchronise(state, rank=rank, world=world, restore="newest")
        job.enter(rank=rank, world=world, generation=generation, keeper=None)
        train(job, state)
        if world > 1:
            dist.barrier()
    finally:
        if grouped:
            dist.destroy_process_group()
    return state
