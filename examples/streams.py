"""Data that can only be read in order: streams of Hugging Face's datasets, each sample taken once, whatever fails.

elasticctl run --workers 2 --checkpoints ckpt examples/streams.py

Needs: pip install datasets torchdata
"""

import argparse
import pathlib
import sys
import sysconfig

import torch
import torch.nn.functional as F
from torch import nn

import elastic

try:
    import datasets
except ImportError:
    sys.exit("examples/streams.py needs Hugging Face's datasets: pip install datasets torchdata")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all")
parser.add_argument("--batch", type=int, default=32, help="global batch: lines per step; a multiple of --streams")
parser.add_argument("--streams", type=int, default=4, help="at least as many as workers, and never changed")
parser.add_argument("--files", type=int, default=40, help="source files of the standard library to read")
parser.add_argument("--width", type=int, default=64)
ARGS = parser.parse_args()
LENGTH = 64
datasets.disable_progress_bars()


def stream(number, count):
    """Stream `number` of `count`: its share of the files, line by line."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [str(path) for path in sorted(folder.glob("*.py"))[: ARGS.files]]
    lines = datasets.load_dataset("text", data_files=files, split="train", streaming=True)
    return lines.filter(lambda line: line["text"].strip()).shard(num_shards=count, index=number)


def collate(lines):
    """Bytes of each line, cut or filled up to LENGTH."""
    texts = [line["text"].encode()[:LENGTH].ljust(LENGTH, b"\n") for line in lines]
    return torch.stack([torch.tensor(list(text)) for text in texts])


class Model(nn.Module):
    """The next byte of a line, from those before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, ARGS.width)
        self.memory = nn.GRU(ARGS.width, ARGS.width, batch_first=True)
        self.head = nn.Linear(ARGS.width, 256)

    def forward(self, x):
        return self.head(self.memory(self.embed(x))[0])


def setup(job):
    torch.manual_seed(0)
    model = Model().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return elastic.State(model=model, optimizer=optimizer, streams=None)  # `streams`: where each of them stands


def train(job, state):
    model = job.ddp(state.model)
    batches = job.streams(
        stream, state, count=ARGS.streams, batch_size=ARGS.batch, steps=ARGS.steps, collate=collate, keep_every=10
    )
    for batch in batches:
        x, y = batch.data[:, :-1], batch.data[:, 1:]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state, loss=loss)
        if job.rank == 0 and state.step % 25 == 0:
            print(f"step {state.step}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
