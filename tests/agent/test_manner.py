"""Managed or plain is what the script does, not what it looks like: real agents, real workers."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.agents import Job
from support.printed import printed
from support.scripts import EPOCH

from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

OPTIONAL = """
import os
try:
    import elastic
except ImportError:
    elastic = None
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", os.environ["RANK"], "sum", int(total), flush=True)
dist.destroy_process_group()
"""

TRAINER = f"""
import os
RANK_AT_IMPORT = os.environ["RANK"]
{EPOCH}
        if job.rank == 1 and state.step == 10 and job.generation == 1:
            os.kill(os.getpid(), 9)
    print("final", state.step, "began as", RANK_AT_IMPORT, flush=True)

def main():
    elastic.run(setup, train)
"""


def run(folder: Path, files: dict[str, str], **spec: Any) -> tuple[Job, list[str]]:
    """The job after it has succeeded, and what each worker printed."""
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    with Job(nodes="1:1", workers=2, agents=1, script=folder / "start.py", spec=spec) as job:
        job.wait_phase(Phase.SUCCEEDED, 90.0)
        job.agents["n0"].wait(timeout=30)  # its last words tell of the end
        logs = (job.folder / "n0" / "logs").glob("slot*.log")
        output = sorted(printed(p) for p in logs)
        job.seen = (job.progress(), job.incidents(), job.state())  # type: ignore[attr-defined]
        return job, output


def test_script_that_imports_elastic_without_calling_run_is_plain(tmp_path: Path) -> None:
    job, printed = run(tmp_path, {"start.py": OPTIONAL})
    assert printed == ["rank 0 sum 2\n", "rank 1 sum 2\n"]
    progress, incidents, state = job.seen  # type: ignore[attr-defined]
    assert not progress.managed
    assert (incidents, state.restarts) == ([], 0)


@pytest.mark.long
def test_a_module_of_pythons_own_is_plain_and_runs_once(tmp_path: Path) -> None:
    spec = {"script": "", "module": "timeit", "args": ["-n", "1", "-r", "1", "print('here')"]}
    _, printed = run(tmp_path, {}, **spec)
    assert [text.count("here") for text in printed] == [1, 1]


@pytest.mark.long
def test_a_script_that_calls_elastic_through_another_module_is_managed(tmp_path: Path) -> None:
    files = {"start.py": "from trainer import main\nmain()\n", "trainer.py": TRAINER}
    job, printed = run(tmp_path, files)
    progress, (incident,), state = job.seen  # type: ignore[attr-defined]
    assert progress.managed
    assert (incident.steps_lost, incident.restored_from, state.restarts) == (0, "live", 1)
    assert printed[1:] == ["final 30 began as 0\n", "final 30 began as 1\n"], "the replacement began as rank 1, too"
