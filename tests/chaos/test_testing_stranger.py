"""elastic.testing as a stranger uses it: a training script that knows nothing of us, under stock torchrun."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from support.procs import Procs
from support.wait import eventually

from elastic import testing

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.long]

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_what_the_page_says_of_a_stock_torchrun_job_and_a_kill_in_its_backward_is_so(tmp_path: pathlib.Path) -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    write, look = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    (command,) = re.findall(r"^ {4}torchrun (.*)$", page, re.MULTILINE)
    (said,) = re.findall(r"^prints `(.*)`", page, re.MULTILINE)
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=True, timeout=60)
    env = {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        # Else torchrun gives new workers a store with the addresses of those before: some wait for them forever.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    with Procs() as procs, (tmp_path / "log").open("wb") as log:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
        job = procs.popen(argv, env=env, cwd=tmp_path, stdout=log, stderr=log)
        eventually(lambda: job.poll() is not None, 100.0, "the job ends", every_s=0.1)
    assert job.returncode == 0, (tmp_path / "log").read_text()
    shown = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (shown.stdout.strip(), shown.stderr) == (said, "")
    assert said == "rank 1 was killed in the backward of step 13: restarted, 13 steps lost"
    record = testing.Record(tmp_path / "plan.record", testing.Plan.read(tmp_path / "plan.json").faults)
    (struck,) = record.struck()
    assert struck.pid in {c.pid for c in record.history.of(1) if c.rank == 1}
    assert record.history.step() == 20
