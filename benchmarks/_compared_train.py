"""The job of benchmarks/compared.py under torchft, NVRx and Ray Train: the model of `_train.py`, each step recorded.

Runs in an environment without elasticd. Each `*_main` follows the framework's own example for DDP.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parent))
from _harness import Recorder
from _model import EVERY, Points, network

BATCH = 32
"""Over all ranks."""


def steps(model: nn.Module, optimizer: Any, loader: DataLoader, step: int, done: Callable[[int], None]) -> None:
    """Train for ever; `done` is called after each step."""
    while True:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(step)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            done(step)
            loss.item()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def save(path: pathlib.Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    aside = path.with_suffix(".aside")
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
    os.replace(aside, path)


def load(path: pathlib.Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step that it was saved at; 0 if there is no checkpoint."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def torchft_main(args: argparse.Namespace) -> None:
    """After train_ddp.py of torchft: each worker is a replica group; survivors keep model and optimizer."""
    import torchft
    from torchft.checkpointing.pg_transport import PGTransport

    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    points, recorder = Points(), Recorder(args.record)
    sampler = torchft.DistributedSampler(
        points, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(points, batch_size=BATCH // groups, sampler=sampler)
    pg = torchft.ProcessGroupGloo(timeout=timedelta(seconds=args.timeout_s))
    model: nn.Module
    optimizer: Any

    def load_state_dict(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    manager = torchft.Manager(
        pg=pg,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"train_ddp_{group}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = torchft.DistributedDataParallel(manager, network())
    optimizer = torchft.Optimizer(manager, adamw(model))
    while True:
        for x, y in loader:
            optimizer.zero_grad()  # asks for the quorum
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            before = manager.current_step()
            optimizer.step()  # does nothing if the gradients of this step were not all exchanged
            if (step := manager.current_step()) > before:
                quorum = manager._quorum_id + 1
                recorder.commit(step, generation=quorum, world_size=manager.num_participants(), rank=group)
            loss.item()


def launcher_main(args: argparse.Namespace) -> None:
    """After basic_ft_example.py of NVRx: heartbeats to the rank monitor of ft_launcher, stock DDP."""
    import nvidia_resiliency_ext.fault_tolerance as ft

    dist.init_process_group("gloo")
    client = ft.RankMonitorClient()
    client.init_workload_monitoring()

    def done(step: int) -> None:
        recorder.commit(step, generation=0, world_size=dist.get_world_size(), rank=dist.get_rank())
        client.send_heartbeat()
        if dist.get_rank() == 0 and step % EVERY == 0:
            save(args.checkpoint, net, optimizer, step)

    points, recorder, net = Points(), Recorder(args.record), network()
    optimizer = adamw(net)
    step = load(args.checkpoint, net, optimizer)
    loader = DataLoader(points, batch_size=BATCH // dist.get_world_size(), sampler=DistributedSampler(points))
    steps(DistributedDataParallel(net), optimizer, loader, step, done)


def inprocess_main(args: argparse.Namespace) -> None:
    """After basic_example.py of NVRx: all of the training is called again in the processes that are left, and in a
    reserve process."""
    import nvidia_resiliency_ext.inprocess as inprocess

    recorder, port = Recorder(args.record), int(os.environ["MASTER_PORT"])
    os.environ["TORCH_CPP_LOG_LEVEL"] = "error"

    def train(call: Any = None) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        server = TCPStore("127.0.0.1", port + 1, world_size, rank == 0, multi_tenant=True)
        store = PrefixStore(str(call.iteration), server)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=10))

        def done(step: int) -> None:
            recorder.commit(step, generation=call.iteration + 1, world_size=world_size, rank=rank)
            if rank == 0 and step % EVERY == 0:
                with call.atomic():
                    save(args.checkpoint, net, optimizer, step)

        points, net = Points(), network()
        optimizer = adamw(net)
        step = load(args.checkpoint, net, optimizer)
        loader = DataLoader(points, batch_size=BATCH // world_size, sampler=DistributedSampler(points))
        steps(DistributedDataParallel(net), optimizer, loader, step, done)

    train.__annotations__["call"] = inprocess.CallWrapper  # by it, as an object, NVRx finds it
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 2},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(args.world_size), inprocess.rank_assignment.ShiftRanks()
        ),
    )
    wrapper(train)()


def ray_main(args: argparse.Namespace) -> None:
    """After Ray Train's guides for PyTorch and for failures; two nodes of two CPUs, as Ray's own tests make them."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, temp_dir=args.temp)
    ray.init(address=cluster.address)
    trainer = TorchTrainer(
        ray_worker,
        train_loop_config={"record": args.record},
        scaling_config=ScalingConfig(num_workers=args.world_size),
        run_config=RunConfig(storage_path=args.temp, failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


def ray_worker(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch

    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    recorder, net, step = Recorder(config["record"]), network(), 0
    optimizer = adamw(net)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            step = load(pathlib.Path(folder, "model.pt"), net, optimizer)

    def done(step: int) -> None:
        recorder.commit(step, generation=0, world_size=world_size, rank=rank)
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    save(pathlib.Path(folder, "model.pt"), net, optimizer, step)
                made = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=made)

    loader = ray.train.torch.prepare_data_loader(DataLoader(Points(), batch_size=BATCH // world_size, shuffle=True))
    steps(ray.train.torch.prepare_model(net), optimizer, loader, step, done)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["torchft", "launcher", "inprocess", "ray"])
    parser.add_argument("--record", required=True)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of torchft's collectives; its example has 5 s")
    parser.add_argument("--temp", help="of Ray: a folder with a short name")
    args = parser.parse_args()
    {"torchft": torchft_main, "launcher": launcher_main, "inprocess": inprocess_main, "ray": ray_main}[args.way](args)


if __name__ == "__main__":
    main()
