"""The loop of Accelerate's documentation on scikit-learn's digits, and what it writes down. A worker can be told to
die."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.integrations.accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--kill", default="", help="place:rank:step,…; each is done once, by the first process there")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--precision", default="no")
ARGS = parser.parse_args()
KILLS = [(place, int(rank), int(step)) for place, rank, step in (k.split(":") for k in ARGS.kill.split(",") if k)]
X, Y = (torch.tensor(part) for part in load_digits(return_X_y=True))
DIGITS = TensorDataset(X[:500].float() / 16, Y[:500])
TESTED = TensorDataset(X[500:600].float() / 16, Y[500:600])


def write(**line: object) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), **line}) + "\n")


def die(place: str, step: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    for number, kill in enumerate(KILLS):
        if kill == (place, rank, step):
            try:
                (ARGS.record / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            write(killed=place, step=step, rank=rank)
            os.kill(os.getpid(), signal.SIGKILL)


def setup(job):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(ARGS.dropout), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step / 20))
    return elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, accuracy=[])


def train(job, state):
    accelerator = Accelerator(job, state, gradient_accumulation_steps=2, mixed_precision=ARGS.precision)
    data, tested = DataLoader(DIGITS, batch_size=24, shuffle=True), DataLoader(TESTED, batch_size=25)
    model, optimizer, data, tested, scheduler = accelerator.prepare(
        state.model, state.optimizer, data, tested, state.scheduler
    )
    for epoch in accelerator.epochs(ARGS.epochs):
        model.train()
        for x, y in data:
            with accelerator.accumulate(model):
                die("forward", state.step)
                loss = F.cross_entropy(model(x), y)
                loss.register_hook(lambda grad: die("backward", state.step))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    die("optimizer", state.step)
                scheduler.step()
                optimizer.zero_grad()
            accelerator.commit(loss)
            if accelerator.sync_gradients:
                write(step=state.step, rank=job.rank, world_size=job.world_size, generation=job.generation)
        model.eval()
        hits = total = 0
        with job.quiet("evaluation", 300), torch.no_grad():
            for x, y in tested:
                die("evaluation", state.step)
                guess, truth = accelerator.gather_for_metrics((model(x).argmax(1), y))
                hits, total = hits + int((guess == truth).sum()), total + len(truth)
        write(epoch=epoch, hits=hits, total=total, rank=job.rank)


state = elastic.run(setup, train)
digest = hashlib.sha256()
for tensor in state.model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
norm = float(sum(p.detach().double().abs().sum() for p in state.model.parameters()))
write(final=digest.hexdigest(), norm=norm, at=state.step, rate=state.scheduler.get_last_lr(),
      rank=int(os.environ.get("RANK", "0")))  # fmt: skip
