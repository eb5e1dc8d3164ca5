"""A job that fails for its own reason is stopped with that reason (G10); a slow one is waited for as it asks."""

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


def test_a_slow_setup_with_a_standby_costs_what_a_quick_one_does() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=520, setup_s=8.0, standby=1, pace_s=0.03)
        job.wait_step(5, 90.0)
        # the standby needs its eight seconds as well before it is of use
        job.order("kill", rank=1, step=450, do="SIGKILL")
        job.wait_over(deadline_s=120.0)
        history = job.check()
        struck_s = float(str(history.struck("kill")["at_s"]))
        back_s = history.back_s(struck_s, history.generations()[0])
        assert back_s < 4.0, f"{back_s:.1f} s: as long as setup"


def test_without_a_standby_the_survivors_go_on_alone_if_the_job_says_so() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(nodes="1:2", steps=500, setup_s=6.0, on_loss="shrink", pace_s=0.03)
        job.wait_step(5, 90.0)
        job.order("kill", rank=1, step=30, do="SIGKILL")
        job.wait_over(deadline_s=120.0)
        history = job.check()
        history.struck("kill")
        worlds = [history.of(g)[0].world for g in history.generations()]
        assert worlds[:3] == [2, 1, 2]
