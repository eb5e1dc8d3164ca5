"""A transformer sharded by FSDP2 (`fully_shard`): each rank has a part of the state, and restores its own.

elasticctl run --workers 2 --checkpoints ckpt -- examples/fsdp.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=4096)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()


class Sorting(torch.utils.data.Dataset):
    """Sequences of digits; to be told: the same, sorted."""

    def __len__(self):
        return args.samples

    def __getitem__(self, i):
        digits = torch.randint(0, 10, (8,), generator=torch.Generator().manual_seed(i))
        return digits, digits.sort().values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(10, args.width), nn.Parameter(torch.zeros(8, args.width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, 4, 2 * args.width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(args.width, 10)

    def forward(self, x):
        x = self.embed(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def setup(job):  # in each generation, with the group formed
    torch.manual_seed(0)
    model = Net().to(job.device)
    mesh = init_device_mesh(job.device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3))


def train(job, state):
    for batch in job.batches(Sorting(), state, batch_size=64, epochs=args.epochs, drop_last=True):
        loss = F.cross_entropy(state.model(batch.x).transpose(1, 2), batch.y)
        loss.backward()
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state, loss=loss)
        if batch.last_of_epoch and job.rank == 0:
            print(f"epoch {batch.epoch}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train, sharded=True)
