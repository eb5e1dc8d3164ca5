"""The script of sharded.py: FSDP2, HSDP or FSDP × TP under elasticd, or FSDP2 with torch's distributed checkpoint."""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _harness import Recorder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", required=True)
parser.add_argument("--mesh", default="fsdp", choices=("fsdp", "hsdp", "tp"))
parser.add_argument("--stock", action="store_true", help="under torchrun, without elastic")
parser.add_argument("--checkpoint", type=pathlib.Path, help="stock: folder of torch's distributed checkpoint")
parser.add_argument("--steps", type=int, default=10**6)
ARGS = parser.parse_args()
EVERY = 20
"""Steps between stock checkpoints."""
WIDTH = 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net, world = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 10)), dist.get_world_size()
    if ARGS.mesh == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif ARGS.mesh == "tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in list(net)[:-1]:
            parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["data"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for block in list(net)[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> torch.Tensor:
    """Ranks of one tensor-parallel group take the same samples."""
    part = rank // 2 if ARGS.mesh == "tp" else rank
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * 1000 + part))
    loss = F.cross_entropy(net(x), x[:, 0].gt(0).long())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def elastic_main() -> None:
    recorder = Recorder(ARGS.record)

    def setup(job: elastic.Job) -> elastic.State:
        net, optimizer = built()
        return elastic.State(model=net, optimizer=optimizer)

    def train(job: elastic.Job, state: elastic.State) -> None:
        while (step := state.step) < ARGS.steps:
            loss = step_of(state.model, state.optimizer, step, job.rank)
            try:
                job.commit(state, loss=loss)
            finally:  # a commit may leave `train` after it has counted
                if state.step > step:
                    recorder.commit(state.step, generation=job.generation, world_size=job.world_size, rank=job.rank)

    elastic.run(setup, train, sharded=True)


def stock_main() -> None:
    """As PyTorch's own tutorials have it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (net, optimizer), step, recorder = built(), 0, Recorder(ARGS.record)

    def saved() -> dict[str, Any]:
        model, moments = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": moments, "step": torch.tensor(step)}

    if ARGS.checkpoint and ARGS.checkpoint.exists():
        content = saved()
        dcp.load(content, checkpoint_id=ARGS.checkpoint)  # type: ignore[attr-defined]
        set_state_dict(
            net,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
        step = int(content["step"])
    while step < ARGS.steps:
        loss = step_of(net, optimizer, step, rank)
        step += 1
        recorder.commit(step, generation=0, world_size=world_size, rank=rank)
        loss.item()  # as a loop that reports its loss does; job.commit does so too
        if ARGS.checkpoint and step % EVERY == 0:
            aside = ARGS.checkpoint.with_suffix(".aside")
            dcp.save(saved(), checkpoint_id=aside)  # type: ignore[attr-defined]
            if rank == 0:
                shutil.rmtree(ARGS.checkpoint, ignore_errors=True)
                os.replace(aside, ARGS.checkpoint)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    stock_main() if ARGS.stock else elastic_main()
