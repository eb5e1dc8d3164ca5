"""Training on streams of webdataset and of Hugging Face's datasets, and on a StatefulDataLoader for each rank; writes
down which samples each committed step had. A worker can be told to die."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import datasets
import torch
import webdataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--kind", choices=["webdataset", "datasets", "loader"], required=True)
parser.add_argument("--data", type=pathlib.Path, required=True)
parser.add_argument("--kill", default="", help="rank:step,…; each is done once, by the first process there")
ARGS = parser.parse_args()
KILLS = [(int(rank), int(step)) for rank, step in (k.split(":") for k in ARGS.kill.split(",") if k)]
SAMPLES, COUNT, BATCH = 128, 4, 8
"""Samples in all, streams, samples of a step: 16 steps are one epoch."""
datasets.disable_progress_bars()


def write(**line: object) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"at_s": time.monotonic(), "pid": os.getpid(), **line}) + "\n")


def paths() -> list[str]:
    return sorted(str(path) for path in ARGS.data.iterdir())


def stream(index: int, count: int) -> Any:
    """As docs/loop.md has it."""
    if ARGS.kind == "webdataset":
        urls = paths()[index::count]
        return webdataset.WebDataset(urls, nodesplitter=lambda urls: urls, shardshuffle=False).decode()
    lines = datasets.load_dataset("json", data_files=paths(), split="train", streaming=True)
    return lines.shard(num_shards=count, index=index)


def numbers(data: Any) -> torch.Tensor:
    return data["json"]["n"] if ARGS.kind == "webdataset" else data["n"]


class Mine(torch.utils.data.IterableDataset):
    """A rank's own part of a stream, with a state of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.first, self.every, self.at = rank, world_size, 0

    def __iter__(self) -> Iterator[int]:
        while self.first + self.at * self.every < SAMPLES:
            self.at += 1
            yield self.first + (self.at - 1) * self.every
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def die(job: elastic.Job, step: int) -> None:
    for number, kill in enumerate(KILLS):
        if kill == (job.rank, step):
            try:
                (ARGS.record / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return elastic.State(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), streams=None, loaders=None
    )


def own_loader(job: elastic.Job, state: elastic.State) -> Iterator[torch.Tensor]:
    """As docs/loop.md has it."""
    loader: Any = StatefulDataLoader(Mine(job.rank, job.world_size), batch_size=BATCH // job.world_size, num_workers=1)
    if state.loaders and len(state.loaders) == job.world_size:
        loader.load_state_dict(state.loaders[job.rank])
    for batch in loader:
        state.loaders = job.gather(loader.state_dict())
        yield batch


def of_library(job: elastic.Job, state: elastic.State) -> Iterator[torch.Tensor]:
    steps = SAMPLES // BATCH
    for batch in job.streams(stream, state, count=COUNT, batch_size=BATCH, steps=steps, keep_every=5):
        yield numbers(batch.data)


def train(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    for taken in (own_loader if ARGS.kind == "loader" else of_library)(job, state):
        step = state.step + 1
        about = {"generation": job.generation, "rank": job.rank, "world_size": job.world_size}
        write(part=step, samples=taken.tolist(), **about)
        die(job, step)
        model(taken.float().unsqueeze(1)).pow(2).mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        time.sleep(0.05)
        try:
            job.commit(state)
        finally:
            if state.step == step:
                write(step=step, **about)


elastic.run(setup, train)
write(final=True)
