"""A loop of one's own with Lightning Fabric, for its precision and collectives: a killed worker costs no step.

elasticctl run --workers 2 --checkpoints ckpt examples/fabric_loop.py

Needs: pip install 'elasticd[lightning]'
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic
from elastic.integrations.lightning import fabric

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--samples", type=int, default=4096)
ARGS = parser.parse_args()

X = torch.linspace(-1, 1, ARGS.samples).unsqueeze(1)
DATA = TensorDataset(X, X * X)


def setup(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(job, state):
    with_fabric = fabric(job, precision="bf16-mixed")
    model, optimizer = with_fabric.setup(state.model, state.optimizer)
    for batch in job.batches(DATA, state, batch_size=64, epochs=ARGS.epochs):
        loss = nn.functional.mse_loss(model(batch.x), batch.y)
        with_fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.commit(state, loss=loss)
        if batch.last_of_epoch and job.rank == 0:
            print(f"epoch {batch.epoch}  loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
