"""The job of benchmarks/thousand_kills.py: each rank's loss of each step, to the bit, and the weights at the end."""

from __future__ import annotations

import hashlib
import os
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F
from torch import nn

import elastic

FOLDER, STEPS = pathlib.Path(sys.argv[1]), int(sys.argv[2])
LOSS = struct.Struct("<qd")  # step, loss: as thousand_kills.py reads it


class Products(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Whether the product of two of 32 numbers is positive."""

    def __init__(self) -> None:
        self.x = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


SAMPLES = Products()


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(0)
    inner = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(nn.Linear(32, 256), *inner, nn.LayerNorm(256), nn.Linear(256, 2)).to(job.device)
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4))


def train(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    descriptor = os.open(FOLDER / f"{job.rank}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for batch in job.batches(SAMPLES, state, batch_size=64, steps=STEPS, epochs=10**6):
        loss = F.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        step, value = state.step, LOSS.pack(state.step, loss.item())
        try:
            job.commit(state, loss=loss)
        finally:  # a commit may leave `train` after it has counted
            if state.step > step:
                os.write(descriptor, value)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in state.model.parameters())).hexdigest()
    (FOLDER / f"weights.{job.rank}").write_text(digest)


if __name__ == "__main__":
    elastic.run(setup, train)
