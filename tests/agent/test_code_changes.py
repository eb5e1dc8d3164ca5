"""Files of the script that change under a running job: a replacement runs what the job began with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = """
import time
import torch
import elastic
from rate import RATE

def setup(job):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE))

def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches([torch.ones(1)] * 400, state, batch_size=4, epochs=1, shuffle=False):
        model(batch.data).mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state)
        time.sleep(0.02)
        if state.step == 10:
            open("ten", "w").close()
    print("weight", abs(round(state.model.weight.item(), 3)), flush=True)

elastic.run(setup, train)
"""


def test_a_replacement_runs_the_code_that_the_job_began_with(tmp_path: Path) -> None:
    script, module = tmp_path / "train.py", tmp_path / "rate.py"
    script.write_text(SCRIPT)
    module.write_text("RATE = 0.005\n")
    with Job(nodes="1:1", script=script) as job:
        eventually((job.folder / "ten").exists, 40.0, "step 10")
        script.write_text("def half(")
        module.write_text("RATE = 0.5\n")
        job.kill_rank(0)
        job.wait_phase(Phase.SUCCEEDED)
        assert [i.steps_lost for i in job.incidents()] == [0]
        said = "".join(log.read_text() for log in (job.folder / "n0" / "logs").glob("slot*.log"))
        assert said.count("weight 0.5") == 2
        assert f"{module} has changed since this job began" in said
