"""Image classification: evaluation each epoch, an average of the weights (EMA), a schedule, random augmentation.

elasticctl run --workers 2 --checkpoints ckpt examples/images.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--images", type=int, default=4000, help="images to train on")
parser.add_argument("--batch", type=int, default=64, help="global batch: images per step over all workers")
ARGS = parser.parse_args()

DIGITS = "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717"
"""0 to 9, in five rows of three pixels, each row an octal digit."""


def pictures(count, seed):
    """(image, digit): each digit 6 by 10 pixels large, somewhere in 16 by 16, under noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = [[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in digit] for digit in DIGITS.split()]
    shapes = torch.tensor(pixels).float().repeat_interleave(2, 1).repeat_interleave(2, 2)
    images = torch.randn(count, 1, 16, 16, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    places = torch.stack([torch.randint(most, (count,), generator=generator) for most in (7, 11)], 1)
    for image, label, (y, x) in zip(images, labels, places.tolist(), strict=True):
        image[0, y : y + 10, x : x + 6] += 2 * shapes[label]
    return TensorDataset(images, labels)


TRAIN, TEST = pictures(ARGS.images, seed=1), pictures(1000, seed=2)
STEPS = ARGS.epochs * math.ceil(ARGS.images / ARGS.batch)


def setup(job):
    torch.manual_seed(0)
    layers = []
    for before, width in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return elastic.State(
        model=model,
        average=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS),
        best=0.0,
    )


def train(job, state):
    def measure(batch):  # sums over one batch of the evaluation; job.evaluate adds them up over all ranks
        return {"right": (state.average(batch.x).argmax(1) == batch.y).sum()}

    model = job.ddp(state.model)
    for epoch in job.epochs(state, ARGS.epochs):  # after a failure: the epoch under way
        for x, y in job.batches(TRAIN, state, batch_size=ARGS.batch):  # and its next batch
            x = x + 0.2 * torch.randn_like(x)  # random numbers are seeded by the step: the same if it is done again
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.average.update_parameters(state.model)  # all that belongs to a step stands before its commit
            state.schedule.step()
            job.commit(state, loss=loss)
        # If a rank is lost from here on, this part is run again, with no turn of the loop above before it.
        sums = job.evaluate(state, TEST, measure, batch_size=250)
        accuracy = sums["right"] / sums["count"]
        state.best = max(state.best, accuracy)  # committed at the end of this body
        if job.rank == 0:
            print(f"epoch {epoch}  accuracy {accuracy:.1%}  best {state.best:.1%}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
