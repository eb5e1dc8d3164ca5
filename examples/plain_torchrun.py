"""A training script that does not use elastic: torchrun's environment, a checkpoint of its own.

    torchrun --nproc-per-node 2 examples/plain_torchrun.py --checkpoint /tmp/plain.pt
    elasticctl run --workers 2 -- examples/plain_torchrun.py --checkpoint /tmp/plain.pt

Under elasticd it is started and restarted from the warm zygote, and resumes by its own means: from its last checkpoint.
With elastic imported, no step would be lost and the surviving processes would stay.
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
ARGS = parser.parse_args()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = 0
    if ARGS.checkpoint.exists():
        saved = torch.load(ARGS.checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(net)
    while step < ARGS.steps:
        generator = torch.Generator().manual_seed(step * world_size + rank)
        x = torch.randn(32, 16, generator=generator)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % ARGS.every == 0:
            aside = ARGS.checkpoint.with_suffix(".aside")
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
            os.replace(aside, ARGS.checkpoint)
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
