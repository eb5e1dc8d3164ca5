"""A job that fails for its own reason is stopped with that reason (G10)."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from chaos.harness import Cluster, Job
from support.incidents import check_incident

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
        (incident,) = failures(job)  # it never stepped again in between
        check_incident(incident, kind="exit", ranks=[1], world_sizes=(2, 0))
        assert "the bug of step 7" in incident["detail"]
        assert [(c["kind"], c["ranks"]) for c in incident["causes"] if c["kind"] == "exit"] == [("exit", [1])] * 3
        assert (incident["error"]["rank"], incident["steps_lost"]) == (1, None)
        cluster.workers_gone()


def failures(job: Job) -> list[dict[str, Any]]:
    """Without processes that took their time to end after their script had, on a busy machine."""
    told = job.incidents()  # once: on a busy machine more of them may follow
    late = [incident for incident in told if incident["kind"] == "late exit"]
    assert all("within 1 s" in incident["detail"] for incident in late), late  # their `stop_grace_s`
    return [incident for incident in told if incident not in late]


SETUP = """
import os, pathlib
import elastic, torch
import torch.nn.functional as F

def setup(job):
    tries = pathlib.Path(os.environ["RECORD_DIR"]) / f"tries.{os.environ['LOCAL_RANK']}"
    with tries.open("a") as file:
        file.write("x")
    if tries.stat().st_size <= int(os.environ["FAILS"]):
        raise LookupError("no such data set")
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def train(job, state):
    while state.step < 3:
        job.commit(state)

elastic.run(setup, train)
"""


@pytest.mark.long
def test_setup_failing_in_all_workers_of_a_node_counts_as_one_failure() -> None:
    with Cluster(nodes=1, slots=3) as cluster:
        script = pathlib.Path(cluster.folder) / "setup.py"
        script.write_text(SETUP)
        rules = {"backoff_s": 0.1, "same_failure": 3}
        job = cluster.submit(script=str(script), restarts=rules, env={"FAILS": "2"})
        job.wait_over()
        assert job.row()["restarts"] == 2
        (incident,) = failures(job)
        check_incident(incident, kind="exit", nodes=["node0"], world_sizes=(3, 3), redone=0)
        assert "no such data set" in incident["detail"]
        job = cluster.submit("hopeless", script=str(script), restarts=rules, env={"FAILS": "100"})
        job.wait_over("failed")
        row = job.row()
        assert row["reason"] == (
            "crash loop: the same failure before the first step, 3 times: LookupError: no such data set"
        )
        (incident,) = failures(job)
        check_incident(incident, kind="exit", nodes=["node0"], world_sizes=(3, 0))
        assert (incident["step"], incident["restored_from"], incident["steps_lost"]) == (0, "nothing", None)
        assert row["restarts"] == 3
        cluster.workers_gone()
