"""DDP that survives its failures: `ddp_plain.py` with elastic.

elasticctl run --workers 2 --checkpoints ckpt examples/ddp.py
"""

import os

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import elastic

EPOCHS = int(os.environ.get("EPOCHS", "50"))
torch.manual_seed(0)
X = torch.rand(10_000, 16)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def network():
    return torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))


def setup(job):
    model = network().to(job.device)
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches(DATA, state, batch_size=64, epochs=EPOCHS):
        x, y = batch
        loss = F.mse_loss(model(x), y)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state, loss=loss)
        if batch.last_of_epoch and job.rank == 0:
            print(f"epoch {batch.epoch}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
