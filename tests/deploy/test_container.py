"""elasticd as the first process of a container: no systemd, process ids of its own, and nothing that reaps for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.daemons import ELASTICCTL, ELASTICD
from support.procs import Procs
from support.scripts import TINY, TINY_STEP
from support.source import ROOT
from support.wait import eventually

TRAIN = f"""{TINY}
    while not job.broadcast(os.path.exists(sys.argv[1]) if job.rank == 0 else None):
{TINY_STEP}"""


def table() -> dict[int, tuple[int, str]]:
    """pid -> (its parent's, its state's letter), of all processes."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(folder.name)] = int(fields[1]), fields[0]
    return found


def below(pid: int) -> dict[int, str]:
    """pid -> state of all descendants."""
    all_of_them = table()
    found, parents = {}, {pid}
    while parents:
        parents = {child for child, (parent, _) in all_of_them.items() if parent in parents}
        found |= {child: all_of_them[child][1] for child in parents}
    return found


class Container:
    """elasticd as process 1 of a pid namespace, in a folder of its own."""

    def __init__(self, folder: Path, procs: Procs) -> None:
        self._folder, self._procs = folder, procs
        self.state = folder / "state"
        argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *ELASTICD, "--state-dir", str(self.state)]
        argv += ["--set", "http.listen=", "--set", "slots=2"]
        with (folder / "elasticd.base.log").open("ab") as log:
            self.process = procs.popen(argv, stdout=log, stderr=log)
        eventually(lambda: self.ctl("nodes").returncode == 0, 30.0, "elasticd is ready", every_s=0.2)

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [*ELASTICCTL, "--socket", str(self.state / "elasticd.sock"), *words]
        env = self._procs.env()
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, env=env, cwd=self._folder)

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ctl("status", name, "--json").stdout)
        return found

    def first(self) -> int:
        """elasticd's id here; inside it is 1."""
        return next(child for child, (parent, _) in table().items() if parent == self.process.pid)


def test_the_image_has_an_etcd_for_one_job_by_itself() -> None:
    extras = re.findall(r"pip install .*'/src\[(.*)]'", (ROOT / "deploy" / "Containerfile").read_text())[0].split(",")
    assert (
        set(extras) <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )
    assert "embedded_listen" in (ROOT / "deploy" / "kubernetes" / "job" / "pod.sh").read_text()
    assert "embedded" in extras


@pytest.mark.long
@pytest.mark.etcd
@pytest.mark.netns
def test_elasticd_runs_jobs_as_the_first_process_and_leaves_no_zombies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    with Procs() as procs:
        container = Container(tmp_path, procs)
        said = container.ctl("run", "--detach", "--workers", "2", "--python", sys.executable, "train.py", "end")
        assert said.returncode == 0, said.stdout + said.stderr
        eventually(lambda: (container.job("train")["step"] or 0) > 20, 60.0, "it trains", every_s=0.2)
        rank = next(row for row in container.job("train")["ranks"] if row["rank"] == 1)
        assert rank["pid"] < 1000, "an id of the container's"

        agent = next(p for p in below(container.first()) if b"elastic.agent" in Path(f"/proc/{p}/cmdline").read_bytes())
        os.kill(agent, signal.SIGKILL)
        step = container.job("train")["step"]
        eventually(lambda: (container.job("train")["step"] or 0) > step + 20, 60.0, "it trains again", every_s=0.2)
        eventually(lambda: "Z" not in below(container.first()).values(), 10.0, "nothing is left unreaped", every_s=0.2)

        (tmp_path / "end").touch()
        eventually(lambda: container.job("train")["phase"] == "succeeded", 60.0, "the job ends", every_s=0.2)
        os.kill(container.first(), signal.SIGTERM)  # docker stop
        container.process.wait(30)
        assert not procs.pids(), "nothing outlives the container"
