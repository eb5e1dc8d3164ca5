"""A pipeline of stages on four ranks: alone, each stage sharded (fully_shard), or with two replicas of each. Every rank
draws numbers of its own, by a generator in its state."""

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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--step-ms", type=float, default=40.0)
parser.add_argument("--of", default="gpipe", help="gpipe or 1f1b, with +sharded or +replicas, and +one_name")
parser.add_argument("--die", default="", help="RANK:STEP:PLACE, comma-separated; a death strikes once")
ARGS = parser.parse_args()
FEATURES = set(ARGS.of.split("+"))
WIDTH, CLASSES, MICRO = 16, 7, 4


class Stage(nn.Module):
    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        wide, name = CLASSES if number == stages - 1 else WIDTH, f"layer{number}"
        if "one_name" in FEATURES:
            wide, name = WIDTH, "layer"
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, wide)})
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class Made:
    """What `setup` makes in each generation beside the state."""

    schedule: Any
    data: Any
    first = last = False
    part = 0


def setup(job: elastic.Job) -> elastic.State:
    world, rank = dist.get_world_size(), dist.get_rank()
    wide = 2 if FEATURES & {"sharded", "replicas"} else 1
    mesh = init_device_mesh("cpu", (world // wide, wide), mesh_dim_names=("stage", "data"))
    number, stages, Made.part = rank // wide, world // wide, rank % wide
    Made.first, Made.last, Made.data = number == 0, number == stages - 1, mesh["data"].get_group()
    torch.manual_seed(number)
    module = Stage(number, stages)
    if "sharded" in FEATURES:
        fully_shard(module, mesh=mesh["data"])
    group = mesh["stage"].get_group()
    stage = PipelineStage(module, number, stages, torch.device("cpu"), group=group)
    kind = Schedule1F1B if "1f1b" in FEATURES else ScheduleGPipe
    Made.schedule = kind(stage, MICRO, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: strike("optimizer"))
    draws = torch.Generator().manual_seed(number if "replicas" in FEATURES else rank)
    return elastic.State(model=module, optimizer=optimizer, draws=draws, drawn=0.0, moment=torch.zeros(2))


def train(job: elastic.Job, state: elastic.State) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a", buffering=1) as log:

        def say(**line: Any) -> None:
            log.write(json.dumps({**line, "rank": job.rank, "pid": os.getpid(), "at_s": time.monotonic()}) + "\n")

        say(entered=state.step, generation=job.generation)
        while state.step < ARGS.steps:
            strike.now = job.rank, state.step
            strike("forward")
            turn(state)
            state.model.seen += 1  # not in the forward, which a schedule calls once more in each generation, for shapes
            strike("backward")
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.drawn = torch.rand((), generator=state.draws).item()
            state.moment += state.drawn
            time.sleep(ARGS.step_ms / 1000)
            strike("node")
            job.commit(state)
            strike("committed")
            say(step=state.step, generation=job.generation, world_size=job.world_size)
        (ARGS.record / f"final-{job.rank}.txt").write_text(digest(state))


def turn(state: elastic.State) -> None:
    draw = torch.Generator().manual_seed(state.step * 2 + Made.part)
    x, y = torch.randn(8, WIDTH, generator=draw), torch.randint(0, CLASSES, (8,), generator=draw)
    Made.schedule.step(*([x] if Made.first else []), **({"target": y} if Made.last else {}))
    if "replicas" in FEATURES:
        for param in state.model.parameters():
            dist.all_reduce(param.grad, group=Made.data)


def digest(state: elastic.State) -> str:
    found = hashlib.sha256(f"{state.drawn} {state.moment.tolist()} {state.model.seen.item()}".encode())
    for param in state.model.parameters():
        for tensor in (param, *(item for _, item in sorted(state.optimizer.state[param].items()))):
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(here.detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def strike(place: str) -> None:
    for death in filter(None, ARGS.die.split(",")):
        marker = ARGS.record / f"died.{death}"
        if death == f"{strike.now[0]}:{strike.now[1]}:{place}" and not marker.exists():
            marker.touch()
            if place == "node":
                time.sleep(60)  # the test kills its node
            os.kill(os.getpid(), signal.SIGKILL)


strike.now = 0, -1
elastic.run(setup, train, sharded=True)
