"""`elastic.testing.Cluster` as a user's test has it."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import psutil
import pytest
from support.procs import alive
from support.wait import eventually

from elastic import testing

pytestmark = [pytest.mark.chaos, pytest.mark.etcd, pytest.mark.slow, pytest.mark.long]

SCRIPT = """
import sys, time
import torch, torch.nn.functional as F
import elastic

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        return torch.full((8,), i / 1000), torch.ones(1)

def setup(job):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))

def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches(Squares(), state, batch_size=8, steps=int(*sys.argv[1:] or [400]), epochs=1000):
        F.mse_loss(model(batch.x), batch.y).backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        time.sleep(0.02)
        job.commit(state)

elastic.run(setup, train)
"""


def test_what_the_page_says_of_a_cluster_and_faults_of_a_rank_a_node_and_etcd_is_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    (snippet,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Cluster" in code]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").write_text(SCRIPT)
    inside: dict[str, Any] = {"seen": (seen := [])}
    exec(f"{snippet}    seen += [*testing.recoveries(job), *job.history.commits]\n", inside)
    killed, stopped, lost, *commits = seen
    assert str(killed) == (
        "rank 1 was killed in the backward of step 20: replaced, the others kept their processes, no steps lost"
    )
    assert [type(each.struck.fault) for each in (stopped, lost)] == [testing.StopEtcd, testing.LoseNode]
    assert lost.steps_lost <= 1
    assert {commit.node for commit in commits} == {"node0", "node1"}
    assert not any(map(alive, {commit.pid for commit in commits}))
    assert not inside["cluster"].folder.exists()


def test_judge_names_what_the_job_was_not_told_to_suffer(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with testing.Cluster(nodes=1) as cluster:
        job = cluster.run(script, 200, faults=[testing.Kill(rank=0, step=10), testing.Kill(rank=7, step=10)])
        eventually(lambda: job.history.step() >= 60, 60.0, "it has stepped again")
        victim = psutil.Process(job.history.commits[-1].pid)
        victim.kill()
        job.wait()
        said = [str(each) for each in testing.judge(job)]
    assert said[0] == "the fault has not struck: rank 7 was killed in the forward of step 10"
    assert len(said) == 2
    assert said[1].startswith("no fault has caused it: incident 3 (exit of ranks 0 on node0: killed by SIGKILL")
