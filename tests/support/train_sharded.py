"""A sharded training job that writes down every commit: FSDP2, HSDP, tensor parallelism, all on gloo."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--step-ms", type=float, default=20.0)
parser.add_argument("--mesh", default="fsdp", choices=("fsdp", "hsdp", "tp", "alone", "whole"))
parser.add_argument("--clip", type=int, default=1, help="clip the gradients, which exchanges within each shard group")
parser.add_argument("--asleep", type=int, default=-1, help="the rank that sleeps in its first setup")
parser.add_argument("--expert", type=int, default=0, help="each rank has other weights under one name")
parser.add_argument("--noise", type=int, default=-1, help="the rank that changes its part by itself in each step")
parser.add_argument("--torn", default="", help="RANK:STEP: on which the fence of that step raises if a rank dies in it")
parser.add_argument("--die", default="", help="RANK:STEP:PLACE, comma-separated; a death strikes once")
ARGS = parser.parse_args()
WIDTH, VOCABULARY = 24, 61


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def setup(job: elastic.Job) -> elastic.State:
    reduce.job = job
    with open(ARGS.record / f"setups.{os.getpid()}", "a") as log:
        log.write("built\n")
    torch.manual_seed(3)
    net = Net()
    if ARGS.mesh != "whole":
        shard(job, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: strike(job, "optimizer"))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ARGS.steps)
    return elastic.State(model=net, optimizer=optimizer, schedule=schedule)


def shard(job: elastic.Job, net: Net) -> None:
    world = dist.get_world_size()
    if ARGS.mesh == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif ARGS.mesh == "tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in net.blocks:
            parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["data"]
    elif ARGS.mesh == "alone":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "shard"))["shard"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if dist.get_rank() == ARGS.asleep and not (marker := ARGS.record / "asleep").exists():
        marker.touch()
        time.sleep(600)
    if ARGS.expert:
        net.add_module("expert", nn.Linear(3, 3))
        nn.init.constant_(net.expert.weight, dist.get_rank())
    net.blocks[1].register_forward_pre_hook(lambda *_: strike(job, "forward"))
    net.blocks[1].register_forward_hook(
        lambda _module, _args, out: out.register_hook(lambda grad: strike(job, "backward")) and None
    )


def train(job: elastic.Job, state: elastic.State) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a", buffering=1) as log:

        def say(**line: Any) -> None:
            log.write(json.dumps({**line, "rank": job.rank, "pid": os.getpid(), "at_s": time.monotonic()}) + "\n")

        say(entered=state.step, generation=job.generation)
        model = job.ddp(state.model) if ARGS.mesh == "whole" else state.model
        while state.step < ARGS.steps:
            strike.step, reduce.count = state.step, 0
            part = job.rank // 2 if ARGS.mesh == "tp" else job.rank  # ranks of one tensor group take the same samples
            x = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(state.step * 1000 + part))
            loss = F.cross_entropy(model(x), x)
            loss.backward()
            if ARGS.mesh != "tp" and ARGS.clip:
                nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.optimizer.step()
            if job.rank == ARGS.noise:
                with torch.no_grad():
                    state.model.head.weight.to_local().mul_(1.0001)
            state.schedule.step()
            state.optimizer.zero_grad()
            time.sleep(ARGS.step_ms / 1000)
            job.commit(state, loss=loss)
            say(step=state.step, generation=job.generation, world_size=job.world_size)
        (ARGS.record / f"final-{job.rank}.txt").write_text(digest(state))


def digest(state: elastic.State) -> str:
    """Of the whole weights and moments, on every rank."""
    found = hashlib.sha256()
    for param in state.model.parameters():
        for tensor in (param.detach(), *(item for _, item in sorted(state.optimizer.state[param].items()))):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(whole.contiguous().numpy().tobytes())
    return found.hexdigest()


def strike(job: elastic.Job, place: str) -> None:
    for death in filter(None, ARGS.die.split(",")):
        marker = ARGS.record / f"died.{death}"
        if death == f"{job.rank}:{strike.step}:{place}" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


strike.step = -1


def reduce(*args: Any, **options: Any) -> Any:
    """Under HSDP there is one in each backward for each group of parameters, among the replicas of a part."""
    reduce.count += 1
    if reduce.count == 3:
        strike(reduce.job, "last all-reduce")
    result = reduce.torch(*args, **options)
    if args[0].numel() == 1:  # the fence
        strike(reduce.job, "fence")
        marker = ARGS.record / "torn"
        if ARGS.torn == f"{reduce.job.rank}:{strike.step}" and not marker.exists():
            marker.touch()
            reduce.torch(torch.zeros(1))  # as if it had raised here: it is never completed
    return result


reduce.count, reduce.job, reduce.torch = 0, None, dist.all_reduce
dist.all_reduce = reduce

elastic.run(setup, train, sharded=ARGS.mesh != "whole")
