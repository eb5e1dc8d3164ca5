"""A GAN with two optimizers, each with a commit of its own: a failure between them costs no step.

elasticctl run --workers 2 --checkpoints ckpt examples/gan.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--points", type=int, default=8192, help="points to train on")
parser.add_argument("--batch", type=int, default=128, help="global batch: points per step over all workers")
parser.add_argument("--width", type=int, default=128)
ARGS = parser.parse_args()
NOISE = 8

torch.manual_seed(0)
ANGLES = torch.arange(8) * math.pi / 4
MODES = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
"""The data are eight small clouds of points on a circle."""
DATA = TensorDataset(MODES[torch.randint(8, (ARGS.points,))] + 0.05 * torch.randn(ARGS.points, 2))


def network(inside, outside):
    width = ARGS.width
    return nn.Sequential(
        nn.Linear(inside, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outside),
    )


def setup(job):
    torch.manual_seed(1)
    generator, critic = network(NOISE, 2).to(job.device), network(2, 1).to(job.device)
    return elastic.State(
        generator=generator,
        critic=critic,
        generator_optimizer=torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9)),
        critic_optimizer=torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.9)),
    )


def train(job, state):
    generator, critic = job.ddp(state.generator), job.ddp(state.critic)
    # Each batch comes twice, as part 0 and part 1, and each time ends with a commit: two steps a batch.
    for batch in job.batches(DATA, state, batch_size=ARGS.batch, epochs=ARGS.epochs, commits=2):
        (real,) = batch.data
        fake = generator(torch.randn(len(real), NOISE, device=job.device))
        if batch.part == 0:  # the critic tells real points from made ones
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            loss.backward()
            state.critic_optimizer.step()
        else:  # the generator makes points that the critic takes for real
            loss = F.softplus(-critic(fake)).mean()
            loss.backward()
            state.generator_optimizer.step()
        state.generator.zero_grad()
        state.critic.zero_grad()  # the generator's loss has left gradients here, too
        job.commit(state, loss=loss)
        if batch.last_of_epoch and job.rank == 0:
            show(batch.epoch, state.generator, job.device)


@torch.no_grad()
def show(epoch, generator, device):
    """How many of the points that are made lie in a cloud, and in how many of the clouds there are some."""
    points = generator(torch.randn(1000, NOISE, device=device)).cpu()
    distance, nearest = torch.cdist(points, MODES).min(1)
    inside = nearest[distance < 0.2]
    print(f"epoch {epoch}  {len(inside) / 10:.0f}% of the points in {len(inside.unique())} of 8 clouds", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
