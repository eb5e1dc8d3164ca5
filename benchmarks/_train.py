"""The job of benchmarks/recovery.py: a model of about 10 MB, each commit recorded. With `elastic`, or stock."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parent))
from _harness import Recorder
from _model import EVERY, Points, network

parser = argparse.ArgumentParser()
parser.add_argument("--record", required=True)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--batch", type=int, default=32, help="over all ranks")
parser.add_argument("--stock", action="store_true", help="plain DDP and DistributedSampler, no elastic")
parser.add_argument("--bucket-cap-mb", type=int, help="stock only: DDP's option, as job.ddp sets it")
parser.add_argument("--checkpoint", type=pathlib.Path, help="stock only: resume from here, save every 20 steps")
ARGS = parser.parse_args()


def elastic_main() -> None:
    import elastic

    def setup(job: elastic.Job) -> elastic.State:
        model = network()
        return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))

    def train(job: elastic.Job, state: elastic.State) -> None:
        model = job.ddp(state.model)
        points = Points()
        for batch in job.batches(points, state, batch_size=ARGS.batch, steps=ARGS.steps, epochs=10**6):
            loss = F.cross_entropy(model(batch.x), batch.y)
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            step = state.step
            try:
                job.commit(state, loss=loss)
            finally:  # a commit may leave `train` after it has counted
                if state.step > step:
                    recorder.commit(state.step, generation=job.generation, world_size=job.world_size, rank=job.rank)

    recorder = Recorder(ARGS.record)
    elastic.run(setup, train)


def stock_main() -> None:
    """As PyTorch's own tutorials have it."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    step = 0
    if ARGS.checkpoint and ARGS.checkpoint.exists():
        saved = torch.load(ARGS.checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net, bucket_cap_mb=ARGS.bucket_cap_mb)
    points = Points()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(points)
    loader = DataLoader(points, batch_size=ARGS.batch // world_size, sampler=sampler)
    recorder = Recorder(ARGS.record)
    while step < ARGS.steps:
        sampler.set_epoch(step)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            recorder.commit(step, generation=0, world_size=world_size, rank=rank)
            loss.item()  # as a loop that reports its loss does; job.commit does so too
            if ARGS.checkpoint and rank == 0 and step % EVERY == 0:
                aside = ARGS.checkpoint.with_suffix(".aside")
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
                os.replace(aside, ARGS.checkpoint)
            if step == ARGS.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    stock_main() if ARGS.stock else elastic_main()
