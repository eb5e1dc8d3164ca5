"""The loop of Accelerate's documentation, with ten lines changed: a killed worker costs no step.

elasticctl run --workers 2 --checkpoints ckpt examples/hf_accelerate.py

Needs: pip install 'elasticd[accelerate]'
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.integrations.accelerate import Accelerator  # in place of accelerate's

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--samples", type=int, default=4096)
parser.add_argument("--batch", type=int, default=32, help="samples of a micro-batch, over all workers")
ARGS = parser.parse_args()

X = torch.linspace(-1, 1, ARGS.samples).unsqueeze(1)
DATA = TensorDataset(X, X * X)


def setup(job):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = ARGS.epochs * ARGS.samples // ARGS.batch // 2
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return elastic.State(model=model, optimizer=optimizer, scheduler=scheduler)


def train(job, state):
    accelerator = Accelerator(job, state, gradient_accumulation_steps=2)
    loader = DataLoader(DATA, batch_size=ARGS.batch, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(state.model, state.optimizer, loader, state.scheduler)
    for epoch in accelerator.epochs(ARGS.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.commit(loss)
            if accelerator.sync_gradients and state.step % 100 == 0:
                accelerator.print(f"epoch {epoch}  step {state.step}  loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
