"""A job of benchmarks/overhead.py: idle, or one that turns its snapshots on and off in turn.

    _overhead_train.py idle
    _overhead_train.py turns FILE SECONDS

With `turns`, rank 0 appends a JSON line to FILE for each span: {"on", "steps", "seconds", "taken"}.
"""

from __future__ import annotations

import json
import random
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import elastic
from elastic.checkpoint import interval as checkpoint_interval

WIDTH = 1024
SETTLE_S = 1.5
"""After a turn this much is not counted: a snapshot was agreed on about a second ahead."""


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6 if sys.argv[1] == "turns" else 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers)
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))


class Turns:
    """Rank 0: whether the next snapshot is planned at all, and what the steps took meanwhile."""

    def __init__(self, job: elastic.Job) -> None:
        self._keeper = job._keeper
        self._out, self._span_s = open(sys.argv[2], "a", buffering=1), float(sys.argv[3])  # noqa: SIM115
        self._chance = random.Random(0)
        self._turn_s = time.monotonic()
        self._from: tuple[float, int, int] | None = None

    def step(self, step: int) -> None:
        keeper, now_s = self._keeper, time.monotonic()
        assert keeper is not None
        if self._from is None and now_s >= self._turn_s + SETTLE_S:
            self._from = now_s, step, keeper._copies
        if self._from is None or now_s < self._from[0] + self._span_s:
            return
        began_s, first, copies = self._from
        told = {
            "on": keeper._snapshots, "steps": step - first, "seconds": now_s - began_s,
            "taken": keeper._copies - copies, "cost_s": keeper._cost_s,
        }  # fmt: skip
        self._out.write(json.dumps(told) + "\n")
        keeper._snapshots = not keeper._snapshots
        self._turn_s, self._from = now_s, None
        if keeper._snapshots:  # a span begins anywhere between two snapshots, as often here as there
            interval_s = checkpoint_interval.snapshot_interval_s(keeper._cost_s, warm=keeper._copies > 1)
            keeper._kept_s = now_s + SETTLE_S - interval_s * self._chance.random()


def train(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    turns = Turns(job) if sys.argv[1] == "turns" and job.rank == 0 else None
    while True:
        loss = F.mse_loss(model(torch.ones(8, WIDTH)), torch.zeros(8, WIDTH))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state, loss=loss)
        if turns is not None:
            turns.step(state.step)
        if sys.argv[1] == "idle":
            with job.quiet("idle", 3600.0):
                time.sleep(3600.0)


if __name__ == "__main__":
    elastic.run(setup, train)
