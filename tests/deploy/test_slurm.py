"""The batch script for Slurm, with stand-ins for srun and scontrol: every node of the allocation is this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.procs import Procs
from support.scripts import TINY, TINY_STEP
from support.source import ROOT
from support.wait import eventually

SCRIPT = ROOT / "deploy" / "slurm" / "elasticd.sbatch"

SRUN = """
import os, signal, subprocess, sys
count = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--ntasks="))
command = sys.argv[next(i for i, a in enumerate(sys.argv) if i and not a.startswith("--")):]
tasks = []
for i in range(count):
    tasks.append(subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(i), "SLURMD_NODENAME": f"n{i}"}))
signal.signal(signal.SIGTERM, lambda *_: [t.send_signal(signal.SIGTERM) for t in tasks])
sys.exit(max(t.wait() for t in tasks))
"""

SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
else:
    open(os.environ["SCONTROL_LOG"], "a").write(" ".join(sys.argv[1:]) + "\\n")
"""

SBATCH = """
import os, sys
args = sys.argv[1:]
while args[0].startswith("--"):
    args = args[2:]
os.execvp("bash", ["bash", *args])
"""

TRAIN = f"""{TINY}
    print("entered at", state.step, "of", job.world_size, flush=True)
    while state.step < int(sys.argv[1]):
{TINY_STEP}"""


class Allocation:
    def __init__(self, folder: Path, procs: Procs) -> None:
        self.folder = folder
        self._procs = procs
        tools = folder / "bin"
        tools.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
            (tools / name).write_text(f"#!{sys.executable}\n{text}")
            (tools / name).chmod(0o755)
        (folder / "train.py").write_text(textwrap.dedent(TRAIN))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.env = {
            **procs.env(), "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n0,n1",
            "SLURM_SUBMIT_DIR": str(folder), "TMPDIR": str(folder),
            "ELASTIC_HEAD": "127.0.0.1", "ELASTIC_PORT": str(port),
            "ELASTIC_MIN_NODES": "2", "SCONTROL_LOG": str(folder / "scontrol.log"),
        }  # fmt: skip

    def sbatch(self, *args: str) -> tuple[subprocess.Popen[bytes], Path]:
        """The script as Slurm runs it on the first node, and its output."""
        return self.run(SCRIPT, "--workers", "1", str(self.folder / "train.py"), *args)

    def run(self, script: Path, *args: str) -> tuple[subprocess.Popen[bytes], Path]:
        out = self.folder / "slurm.out"
        with out.open("wb") as file:
            run = self._procs.popen(
                ["bash", str(script), *args], stdout=file, stderr=file, env=self.env, cwd=self.folder
            )
        return run, out


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    with Procs() as procs:
        yield Allocation(tmp_path, procs)


@pytest.mark.long
@pytest.mark.etcd
def test_job_runs_on_all_nodes_is_requeued_at_its_time_limit_and_goes_on(allocation: Allocation) -> None:
    run, out = allocation.sbatch("100000")
    eventually(lambda: "entered at 0 of 2" in out.read_text(), 90.0)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(60) == 0, out.read_text()
    assert (allocation.folder / "scontrol.log").read_text() == "requeue 4711\n"
    run, out = allocation.sbatch("1")  # the steps made so far are more
    assert run.wait(90) == 0, out.read_text()
    entered = [line for line in out.read_text().splitlines() if "entered at" in line]
    assert entered
    assert all("entered at 0 " not in line for line in entered)
    left = {p.name for p in (allocation.folder / ".elasticd" / "4711").iterdir()}
    assert left == {"checkpoints"}  # no key stays behind
    assert "could not be ended" not in out.read_text()
    assert not list(allocation.folder.glob("elasticd-4711-*"))


@pytest.mark.long
@pytest.mark.etcd
def test_example_trains_on_all_nodes(allocation: Allocation) -> None:
    small = "--steps 50 --batch 8 --context 16 --width 16 --layers 1"
    run, out = allocation.run(ROOT / "examples" / "slurm.sh", *small.split())
    assert run.wait(90) == 0, out.read_text()
    assert "has succeeded at step 50" in out.read_text(), out.read_text()


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [((), {"SLURM_JOB_ID": "1"}, "give a training script"), (("t.py",), {}, "SLURM_JOB_ID is not set")],
)
def test_wrong_usage_is_refused_with_the_cure(args: tuple[str, ...], env: dict[str, str], said: str) -> None:
    env = {"PATH": os.environ["PATH"], **env}
    run = subprocess.run(["bash", str(SCRIPT), *args], capture_output=True, text=True, timeout=60, env=env)
    assert run.returncode == 2
    assert said in run.stderr
