"""A job that fails for its own reason is stopped with that reason (G10)."""

from __future__ import annotations

import pathlib

import pytest
from chaos.harness import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

BUG = """
import os
import elastic, torch
import torch.nn.functional as F

def setup(job):
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches([(torch.ones(1), torch.ones(1))] * 64, state, batch_size=4, epochs=100):
        if state.step == 7 and job.rank == 1:
            raise IndexError(f"the bug of step {state.step}")
        F.mse_loss(model(batch.x), batch.y).backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        job.commit(state)

elastic.run(setup, train)
"""


def test_the_same_exception_at_the_same_step_stops_the_job() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        script = pathlib.Path(cluster.folder) / "bug.py"
        script.write_text(BUG)
        job = cluster.submit(script=str(script), restarts={"same_failure": 3, "backoff_s": 0.1})
        job.wait_over("failed")
        row = job.row()
        assert "the bug of step 7" in str(row["error"])
        assert "IndexError" in row["error"]["traceback"]
        assert row["error"]["rank"] == 1
        assert row["restarts"] == 3
        cluster.workers_gone()
