"""The batch script for Slurm, with stand-ins for srun and scontrol: every node of the allocation is this machine."""

from __future__ import annotations

import contextlib
import json
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
import json, os, signal, subprocess, sys
count = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--ntasks="))
command = sys.argv[next(i for i, a in enumerate(sys.argv) if i and not a.startswith("--")):]
tasks = []
own = json.loads(os.environ.get("ENV_OF", "{}"))
for i in range(count):
    of_node = {"SLURM_PROCID": str(i), "SLURMD_NODENAME": f"n{i}", **own.get(f"n{i}", {})}
    tasks.append(subprocess.Popen(command, env={**os.environ, **of_node}))
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


UNTIL = f"""{TINY}
    print("entered at", state.step, "of", job.world_size, flush=True)  # each rank: that of this node is shown
    while not job.broadcast(os.path.exists(sys.argv[1]) if job.rank == 0 else None):
{TINY_STEP}"""
"""Trains until a file is there."""


def free_job() -> str:
    """The id of a Slurm job whose port for etcd is free."""
    while True:
        job = int.from_bytes(os.urandom(4))  # not by `random`: the processes of a test run have the same seed
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", 20000 + job % 10000))
            return str(job)


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
        (folder / "until.py").write_text(textwrap.dedent(UNTIL))
        self.job = free_job()
        self.env = {
            **procs.env(), "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": self.job, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n0,n1",
            "SLURM_SUBMIT_DIR": str(folder), "TMPDIR": str(folder),
            "ELASTIC_MIN_NODES": "2", "SCONTROL_LOG": str(folder / "scontrol.log"),
        }  # fmt: skip

    def sbatch(self, *args: str) -> tuple[subprocess.Popen[bytes], Path]:
        """The script as Slurm runs it on the first node, and its output."""
        return self.run(SCRIPT, "--workers", "1", str(self.folder / "train.py"), *args)

    def start_own(self) -> subprocess.Popen[bytes]:
        """An elasticd that the user has for other things, with the default folders."""
        with (self.folder / "own.out").open("wb") as file:
            own = self._procs.popen(
                ["elasticd", "--set", "http.listen="], stdout=file, stderr=file, env=self.env, cwd=self.folder
            )
        eventually(lambda: "node.registered" in (self.folder / "own.out").read_text(), 30.0, "it runs")
        return own

    def daemon(self, number: int) -> int:
        """Process id of the elasticd of a node; 0: it has not begun."""
        lock = self.folder / f"elasticd-{self.job}-{number}" / "lock"
        return int(lock.read_text() or 0) if lock.exists() else 0

    def run(self, script: Path, *args: str) -> tuple[subprocess.Popen[bytes], Path]:
        out = self.folder / "slurm.out"
        with out.open("wb") as file:
            run = self._procs.popen(
                ["bash", str(script), *args], stdout=file, stderr=file, env=self.env, cwd=self.folder
            )
        return run, out


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    if not subprocess.run(["hostname", "-I"], capture_output=True, check=True).stdout.strip():
        pytest.skip("this machine has no address but loopback")
    with Procs() as procs:
        yield Allocation(tmp_path, procs)


@pytest.mark.long
@pytest.mark.etcd
def test_job_runs_on_all_nodes_is_requeued_at_its_time_limit_and_goes_on(allocation: Allocation) -> None:
    run, out = allocation.sbatch("100000")
    eventually(lambda: "entered at 0 of 2" in out.read_text(), 90.0)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(60) == 0, out.read_text()
    assert (allocation.folder / "scontrol.log").read_text() == f"requeue {allocation.job}\n"
    run, out = allocation.sbatch("1")  # the steps made so far are more
    assert run.wait(90) == 0, out.read_text()
    entered = [line for line in out.read_text().splitlines() if "entered at" in line]
    assert entered
    assert all("entered at 0 " not in line for line in entered)
    left = {p.name for p in (allocation.folder / ".elasticd" / allocation.job).iterdir()}
    assert left == {"checkpoints"}  # no key stays behind
    assert "could not be ended" not in out.read_text()
    assert not list(allocation.folder.glob(f"elasticd-{allocation.job}-*"))


@pytest.mark.long
@pytest.mark.etcd
def test_example_trains_on_all_nodes(allocation: Allocation) -> None:
    small = "--steps 50 --batch 8 --context 16 --width 16 --layers 1"
    run, out = allocation.run(ROOT / "examples" / "slurm.sh", *small.split())
    assert run.wait(90) == 0, out.read_text()
    assert "has succeeded at step 50" in out.read_text(), out.read_text()


@pytest.mark.long
@pytest.mark.etcd
def test_a_setting_that_one_node_refuses_ends_the_slurm_job_with_the_reason(allocation: Allocation) -> None:
    allocation.env |= {"ELASTIC_MIN_NODES": "1", "ENV_OF": json.dumps({"n1": {"ELASTICD_SLOTS": "many"}})}
    run, out = allocation.run(SCRIPT, "--workers", "1", str(allocation.folder / "until.py"), "end")
    assert run.wait(90) == 1, out.read_text()
    assert out.read_text().count("elasticd.sbatch: n1: elasticd cannot run here (exit code 78)") == 1
    assert "slots" in out.read_text().rpartition("n1: elasticd cannot run here")[2]
    assert not list(allocation.folder.glob(f"elasticd-{allocation.job}-*"))
    assert not list((allocation.folder / ".elasticd" / allocation.job).glob("failed*"))


@pytest.mark.long
@pytest.mark.etcd
def test_an_elasticd_that_dies_is_started_again_and_training_is_not_affected(allocation: Allocation) -> None:
    run, out = allocation.run(SCRIPT, "--workers", "1", str(allocation.folder / "until.py"), "end")
    eventually(lambda: "entered at 0 of 2" in out.read_text(), 90.0)
    for number in (1, 0):
        before = allocation.daemon(number)
        os.kill(before, signal.SIGKILL)
        eventually(lambda n=number, b=before: allocation.daemon(n) not in (0, b), 30.0, "another one runs")
    (allocation.folder / "end").touch()
    assert run.wait(60) == 0, out.read_text()
    assert out.read_text().count("entered at") == 1, out.read_text()
    assert not list(allocation.folder.glob(f"elasticd-{allocation.job}-*"))


@pytest.mark.long
@pytest.mark.etcd
def test_an_elasticd_that_cannot_live_leaves_its_node_and_ends_nothing_of_others(allocation: Allocation) -> None:
    """Its state directory is a file. The user's own elasticd, of the default folder, is no business of the script."""
    allocation.env |= {"ELASTIC_MIN_NODES": "1", "XDG_STATE_HOME": str(allocation.folder / "own")}
    own = allocation.start_own()
    blocked = {"n1": {"ELASTIC_LOCAL": str(allocation.folder / "train.py" / "no-folder")}}
    allocation.env["ENV_OF"] = json.dumps(blocked)
    run, out = allocation.run(SCRIPT, "--workers", "1", str(allocation.folder / "until.py"), "end")
    eventually(lambda: "n1: elasticd has died 5 times" in out.read_text(), 90.0)
    eventually(lambda: "entered at 0 of 1" in out.read_text(), 90.0)
    assert own.poll() is None
    (allocation.folder / "end").touch()
    assert run.wait(60) == 0, out.read_text()
    assert own.poll() is None


@pytest.mark.long
@pytest.mark.etcd
def test_a_new_slurm_job_goes_on_from_the_checkpoints_of_an_earlier_one(allocation: Allocation) -> None:
    run, out = allocation.sbatch("50")
    assert run.wait(90) == 0, out.read_text()
    shared = allocation.folder / ".elasticd" / allocation.job
    allocation.env |= {"ELASTIC_NAME": f"slurm-{allocation.job}", "ELASTIC_SHARED": str(shared)}
    allocation.env["SLURM_JOB_ID"] = free_job()
    run, out = allocation.sbatch("60")
    assert run.wait(90) == 0, out.read_text()
    assert "entered at 50 of 2" in out.read_text(), out.read_text()


@pytest.mark.long
@pytest.mark.etcd
def test_slurm_jobs_with_one_name_go_on_from_each_other(allocation: Allocation) -> None:
    allocation.env["ELASTIC_NAME"] = "gpt"
    run, out = allocation.sbatch("50")
    assert run.wait(90) == 0, out.read_text()
    allocation.env["SLURM_JOB_ID"] = free_job()
    run, out = allocation.sbatch("60")
    assert run.wait(90) == 0, out.read_text()
    assert "entered at 50 of 2" in out.read_text(), out.read_text()
    assert {path.name for path in (allocation.folder / ".elasticd").iterdir()} == {"gpt"}


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [((), {"SLURM_JOB_ID": "1"}, "give a training script"), (("t.py",), {}, "SLURM_JOB_ID is not set")],
)
def test_wrong_usage_is_refused_with_the_cure(args: tuple[str, ...], env: dict[str, str], said: str) -> None:
    env = {"PATH": os.environ["PATH"], **env}
    run = subprocess.run(["bash", str(SCRIPT), *args], capture_output=True, text=True, timeout=60, env=env)
    assert run.returncode == 2
    assert said in run.stderr
