"""A script's own error may quote what is no text: a file's name in another encoding. The job is stopped with it."""

from __future__ import annotations

import pathlib

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, codes

pytestmark = pytest.mark.etcd

SCRIPT = """
import elastic, torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def setup(job):
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def train(job, state):
    while state.step < 1000:
        if state.step == 7 and job.rank == 1:
            raise FileNotFoundError("caf\\udce9.png")
        dist.all_reduce(torch.ones(1))
        job.commit(state)

@record  # which writes the error down, as scripts for torchrun have it
def main():
    elastic.run(setup, train)

main()
"""


@pytest.mark.long
def test_script_error_with_invalid_utf8_text_is_stopped_as_crash_loop(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "strange.py"
    script.write_text(SCRIPT)
    rules = {"restarts": {"same_failure": 2, "backoff_s": 0.1}}
    with Job(nodes="2:2", workers=1, script=script, spec=rules) as job:
        state = job.wait_phase(Phase.FAILED, 40.0)
        assert Code.CRASH_LOOP in codes(state.reason)
        assert state.error is not None
        assert "FileNotFoundError: caf\\udce9.png" in state.error.message
        assert state.error.rank == 1
        eventually(job.incidents, 10.0, "its incident")
