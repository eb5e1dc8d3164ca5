"""The batch script for Slurm, with slurmctld, slurmd and munge of this machine: two nodes of a cluster of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import scratch
from support.procs import Procs
from support.scripts import TINY, TINY_STEP
from support.source import ROOT
from support.wait import eventually

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]

pytestmark = [
    pytest.mark.long,
    pytest.mark.etcd,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: slurmd and munged with a configuration of their own"),
]

SCRIPT = ROOT / "deploy" / "slurm" / "elasticd.sbatch"

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n0 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""

TRAIN = f"""{TINY}
    with open("entered", "a") as file:
        print(state.step, job.world_size, os.getpid(), file=file)
    last = state.step + 20 if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else 10**9
    while state.step < last:
{TINY_STEP}"""


class Slurm:
    """A controller and two nodes on this machine."""

    def __init__(self, folder: Path, procs: Procs) -> None:
        self.folder, self._procs = folder, procs
        self.env = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        }
        probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [probe.getsockname()[1] for probe in probes]
        for probe in probes:
            probe.close()
        text = CONF.format(folder=folder, ports=ports, host=socket.gethostname())
        (folder / "slurm.conf").write_text(text)
        for name in ("state", "spool-n0", "spool-n1"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)

    def start(self) -> None:
        own = [f"--{name}={self.folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self._run("munged", "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key", *own)
        eventually((self.folder / "munge.socket").exists, 10.0, "munged is ready")
        self._run("slurmctld", "slurmctld", "-D")
        for name in ("n0", "n1"):
            # Debian's slurmd takes one node for each host name.
            self._run(name, "unshare", "--uts", "bash", "-c", 'hostname "$0" && exec slurmd -D', name)
        wanted = ["2", "idle"]
        eventually(lambda: self.call("sinfo", "-h", "-o", "%D %t").split() == wanted, 60.0, "both nodes are idle")

    def _run(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as file:
            self._procs.popen(argv, stdout=file, stderr=file, env=self.env, cwd=self.folder)

    def call(self, *argv: str) -> str:
        env = self._procs.env(self.env)
        run = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=env, cwd=self.folder, check=False)
        return run.stdout + run.stderr

    def job(self, number: str, field: str) -> str:
        """One field of `scontrol show job`."""
        found = re.search(rf"\b{field}=(\S+)", self.call("scontrol", "show", "job", number))
        return found.group(1) if found else ""

    def logs(self) -> str:
        return "\n".join(f"── {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    folder = Path(scratch.folder("slurm", "/tmp"))
    folder.chmod(0o755)  # munged checks the path of its socket
    try:
        with Procs() as procs:
            slurm = Slurm(folder, procs)
            slurm.start()
            yield slurm
            slurm.call("scancel", "--full", "--state=RUNNING", "--user=root")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_job_is_drained_at_its_time_limit_requeued_by_slurm_and_goes_on(slurm: Slurm) -> None:
    folder = slurm.folder
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    out = folder / "slurm.out"
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    given = f"ALL,ELASTIC_PORT={port},ELASTIC_MIN_NODES=2,TMPDIR={folder}"
    said = slurm.call(
        "sbatch", "--nodes=2", "--time=2", "--signal=B:USR1@40", f"--export={given}", f"--output={out}",
        str(SCRIPT), "--workers", "1", str(folder / "train.py"),
    )  # fmt: skip
    number = said.split()[-1]
    assert said.startswith("Submitted batch job"), said

    def entered() -> list[tuple[int, int, int]]:
        """(step, world size, pid) of each entry of `train`, on any node."""
        lines = (folder / "entered").read_text().splitlines() if (folder / "entered").exists() else []
        return [(int(step), int(size), int(pid)) for step, size, pid in (line.split() for line in lines)]

    eventually(lambda: len(entered()) == 2, 90.0, "both workers train")
    os.kill(entered()[0][2], signal.SIGKILL)
    eventually(lambda: len(entered()) == 4, 30.0, "both workers train again after one was killed")
    eventually(lambda: slurm.job(number, "Restarts") == "1", 150.0, "Slurm has requeued the job")
    assert "the time limit is near" in out.read_text()
    before = len(entered())
    eventually(lambda: slurm.job(number, "JobState") == "COMPLETED", 150.0, "the second run is complete")
    print("\n".join(line for line in out.read_text().splitlines() if not line.startswith("{")))  # pytest -s shows it
    again = entered()[before:]
    assert [size for _, size, _ in again] == [2, 2]
    assert all(step > 100 for step, _, _ in again), "it goes on from the checkpoint"
    assert {p.name for p in (folder / ".elasticd" / number).iterdir()} == {"checkpoints"}  # no key stays behind
