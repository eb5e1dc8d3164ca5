"""A loop of one's own around Accelerate's FSDP2 or Fabric's ModelParallelStrategy, and what it writes down. A worker
can be told to die."""

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
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from lightning.fabric import Fabric
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--by", required=True, help="name of a function below, which shards")
parser.add_argument("--kill", default="", help="place:rank:step,…; each is done once")
ARGS = parser.parse_args()
ARGS.record.mkdir(exist_ok=True)
EPOCHS, SAMPLES, BATCH = 2, 120, 8  # 30 steps
DATA = TensorDataset(torch.randint(0, 61, (SAMPLES, 6), generator=torch.Generator().manual_seed(1)))


def write(**line: object) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")


def die(place: str, job: elastic.Job, step: int) -> None:
    for kill in filter(None, ARGS.kill.split(",")):
        flag = ARGS.record / kill.replace(":", "-")
        if kill == f"{place}:{job.rank}:{step}" and not flag.exists():
            flag.touch()
            write(killed=place, rank=job.rank, at=step)
            os.kill(os.getpid(), signal.SIGKILL)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(24, 50), nn.Dropout(0.1), nn.Linear(50, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 24), nn.Linear(24, 61)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Made:
    """What the framework has made in `setup`, for `train`."""

    by: Any = None
    model: Any = None
    clip: Any = None
    step = 0


def accelerate(job: elastic.Job, net: nn.Module, version: int = 2) -> tuple[Any, Any]:
    AcceleratorState._reset_state(True)
    if job.device.type == "cpu":  # there Accelerate has no FSDP, says nothing, and takes DDP
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    Made.by = Accelerator(cpu=job.device.type == "cpu", fsdp_plugin=plugin)
    Made.clip = lambda state: Made.by.clip_grad_norm_(state.model.parameters(), 1.0)
    model, optimizer = Made.by.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    return model, optimizer.optimizer


def accelerate_fsdp1(job: elastic.Job, net: nn.Module) -> tuple[Any, Any]:
    fsdp1_on_cpu()
    return accelerate(job, net, version=1)


def fsdp1_on_cpu() -> None:
    """It takes no other device than "cpu" there, which the frameworks do not give."""
    made = FSDP.__init__
    FSDP.__init__ = lambda own, *args, **options: made(own, *args, **(options | {"device_id": torch.device("cpu")}))


def fabric(job: elastic.Job, net: nn.Module) -> tuple[Any, Any]:
    def shard(model: Any, mesh: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    world = dist.get_world_size()
    return fabric_with(job, net, ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1))


def fabric_with(job: elastic.Job, net: nn.Module, strategy: Any) -> tuple[Any, Any]:
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    Made.by = Fabric(accelerator=job.device.type, devices=local, num_nodes=world // local, strategy=strategy)
    Made.clip = lambda state: Made.by.clip_gradients(Made.model, state.optimizer, max_norm=1.0)
    Made.by.launch()
    Made.model = Made.by.setup(net)
    optimizer = torch.optim.Adam(Made.model.parameters(), lr=1e-2)
    return net, optimizer


def fabric_fsdp1(job: elastic.Job, net: nn.Module) -> tuple[Any, Any]:
    _Connector._check_strategy_and_fallback = lambda own: None  # which refuses it on a CPU
    fsdp1_on_cpu()
    return fabric_with(job, net, FSDPStrategy())


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(0)
    write(setup=os.environ["RANK"])
    model, optimizer = globals()[ARGS.by](job, Net())
    optimizer.register_step_post_hook(lambda *_: die("optimizer", job, Made.step))
    model.blocks[1].register_forward_hook(
        lambda _module, _args, out: out.register_hook(lambda grad: die("backward", job, Made.step)) and None
    )
    return elastic.State(model=model, optimizer=optimizer)


def train(job: elastic.Job, state: elastic.State) -> None:
    write(entered=state.step, rank=job.rank, generation=job.generation)
    model = Made.model or state.model
    for (x,) in job.batches(DATA, state, batch_size=BATCH, epochs=EPOCHS):
        Made.step = state.step
        die("forward", job, state.step)
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        Made.by.backward(loss)
        Made.clip(state)
        state.optimizer.step()
        state.optimizer.zero_grad()
        time.sleep(0.02)
        job.commit(state, loss=loss)
        write(step=state.step, rank=job.rank, loss=loss.item().hex(), generation=job.generation)
    write(final=digest(state), rank=job.rank, done=state.step)


def digest(state: elastic.State) -> str:
    """Of the whole weights and moments, on every rank."""
    found = hashlib.sha256()
    for param in state.model.parameters():
        assert param.to_local().numel() < param.numel(), "the model is not sharded"
        for tensor in (param.detach(), *(item for _, item in sorted(state.optimizer.state[param].items()))):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(whole.contiguous().numpy().tobytes())
    return found.hexdigest()


elastic.run(setup, train, sharded=True)
