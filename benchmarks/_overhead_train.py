"""A job of benchmarks/overhead.py: idle, or one that notes the duration of its steps.

    _overhead_train.py idle
    _overhead_train.py trace FILE SECONDS WIDTH

With `trace`, rank 0 writes FILE after SECONDS and LEAST snapshots: {"rows": [[seconds of a step, snapshot begun at its
end], …], "cost_s"}. Layers are WIDTH wide.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import elastic
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler

WIDTH = int(sys.argv[4]) if sys.argv[1] == "trace" else 1024
LEAST = 4
WARM_COPIES = 4
"""Steps count from this snapshot on: the first ones fill fresh pages."""


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6 if sys.argv[1] == "trace" else 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers)
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))


class Trace:
    """Rank 0: the duration of each step, and whether a snapshot was begun at its end."""

    def __init__(self, job: elastic.Job) -> None:
        assert isinstance(job._checkpoint_scheduler, CheckpointScheduler)
        self._checkpoint_scheduler = job._checkpoint_scheduler
        self._out, self._seconds = pathlib.Path(sys.argv[2]), float(sys.argv[3])
        self._rows: list[tuple[float, bool]] = []
        self._from_s = self._stepped_s = time.monotonic()
        self._kept_s = self._checkpoint_scheduler.policy.kept_s

    def step(self) -> None:
        now_s, scheduler = time.monotonic(), self._checkpoint_scheduler
        self._rows.append((now_s - self._stepped_s, scheduler.policy.kept_s != self._kept_s))
        self._stepped_s, self._kept_s = now_s, scheduler.policy.kept_s
        if scheduler.policy.cost.copies < WARM_COPIES:
            self._from_s = now_s
            self._rows.clear()
        if now_s > self._from_s + self._seconds and sum(kept for _, kept in self._rows) >= LEAST:
            part = self._out.with_suffix(".part")
            part.write_text(json.dumps({"rows": self._rows, "cost_s": scheduler.policy.cost.seconds}))
            part.rename(self._out)
            self._from_s = float("inf")


def train(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    trace = Trace(job) if sys.argv[1] == "trace" and job.rank == 0 else None
    while True:
        loss = F.mse_loss(model(torch.ones(8, WIDTH)), torch.zeros(8, WIDTH))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state, loss=loss)
        if trace is not None:
            trace.step()
        if sys.argv[1] == "idle":
            with job.quiet("idle", 3600.0):
                time.sleep(3600.0)


if __name__ == "__main__":
    elastic.run(setup, train)
