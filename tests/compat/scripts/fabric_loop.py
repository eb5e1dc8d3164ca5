"""A loop with Fabric in elastic.run, and what it writes down. A worker can be told to die."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal

import torch

import elastic
from elastic.integrations.lightning import fabric

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--kill", default="", help="place:rank:step,…; each is done once")
ARGS = parser.parse_args()
ARGS.record.mkdir(exist_ok=True)


def write(**line: object) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")


def die(place: str, job: elastic.Job, step: int) -> None:
    for kill in filter(None, ARGS.kill.split(",")):
        flag = ARGS.record / kill.replace(":", "-")
        if kill == f"{place}:{job.rank}:{step}" and not flag.exists():
            flag.touch()
            write(killed=place, rank=job.rank, step=step)
            os.kill(os.getpid(), signal.SIGKILL)


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2))


def train(job: elastic.Job, state: elastic.State) -> None:
    made = fabric(job, precision="bf16-mixed")
    model, optimizer = made.setup(state.model, state.optimizer)
    for batch in job.batches(Data(), state, batch_size=8, epochs=2):
        loss = torch.nn.functional.mse_loss(model(batch.x), batch.y)
        die("backward", job, state.step)
        made.backward(loss)
        made.all_reduce(loss.detach())
        optimizer.step()
        die("optimizer", job, state.step)
        optimizer.zero_grad()
        job.commit(state, loss=loss)
        write(step=state.step, rank=job.rank)
    weights = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.model.state_dict().values())).hexdigest()
    write(final=weights, rank=job.rank, at=state.step, of=made.world_size)


elastic.run(setup, train)
