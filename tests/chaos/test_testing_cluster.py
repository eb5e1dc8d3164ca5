"""`elastic.testing.Cluster` as a user's test has it."""

from __future__ import annotations

import getpass
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from support.procs import alive
from support.wait import eventually

from elastic import testing
from elasticd.ctl import main as ctl

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
    for batch in job.batches(Squares(), state, batch_size=8, steps=int((sys.argv[1:] or [400])[0]), epochs=1000):
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


HOLDS = """
import signal, sys
from elastic.testing.cluster import full
with full(sys.argv[1]):
    print("full", flush=True)
    signal.pause()
"""


@pytest.fixture
def own_mount(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    if os.geteuid() or not shutil.which("nft"):
        pytest.skip("needs root, to mount, and nft, to drop packets")
    folder = tmp_path / "mount"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True, timeout=10)
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=10)


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True, timeout=10).stdout


def test_a_disk_is_full_and_a_link_is_cut_for_so_long_and_nothing_stays(
    own_mount: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script, free = tmp_path / "train.py", os.statvfs(own_mount).f_bavail
    write = """        if job.rank == 0:
            try:
                open(f"{sys.argv[2]}/{state.step}", "wb").write(bytes(8192))
            except OSError as error:
                print(error.errno, state.step, file=open(sys.argv[3], "a"))
"""
    script.write_text(SCRIPT.replace("        job.commit(state)\n", f"{write}        job.commit(state)\n"))
    before, failed = tables(), tmp_path / "failed"
    faults = [
        testing.FillDisk(folder=str(own_mount), step=20, for_s=0.5),
        testing.DropLink(rank=0, other=1, step=80, for_s=0.7),
    ]  # fmt: skip
    with testing.Cluster(nodes=2) as cluster:
        job = cluster.run(script, 150, own_mount, failed, faults=faults)
        assert job.wait(60.0) == "succeeded"
        assert not [str(each) for each in testing.judge(job)]
        full, cut = (struck.at_s for struck in job.struck())
        commits = job.history.commits
    errors = [tuple(map(int, line.split())) for line in failed.read_text().splitlines()]
    assert {number for number, _ in errors} == {28}
    steps = {step: min(c.at_s for c in commits if c.step == step) for _, step in errors}
    assert all(-0.1 <= at_s - full <= 1.0 for at_s in steps.values())
    silent_s = max(b.at_s - a.at_s for a, b in itertools.pairwise(commits) if b.at_s > cut)
    assert silent_s >= 0.6
    for file in own_mount.iterdir():
        file.unlink()
    assert (os.statvfs(own_mount).f_bavail, tables()) == (free, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_disk_is_free_again_however_the_test_ends(own_mount: pathlib.Path, number: int) -> None:
    free = os.statvfs(own_mount).f_bavail
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, own_mount], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as test:
        assert test.stdout
        assert test.stdout.readline() == b"full\n"
        assert os.statvfs(own_mount).f_bavail == 0
        test.send_signal(number)
    assert os.statvfs(own_mount).f_bavail == free
    assert not os.listdir(own_mount)


def test_elasticctl_strikes_a_job_that_runs(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def fault(node: testing.Node, *words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            ctl.main(["--socket", node.client.path, "fault", *words])
        said = capsys.readouterr()
        return int(str(ended.value.code)), said.out + said.err

    with testing.Cluster(nodes=2, settings={"allow_faults": True}) as cluster:
        job = cluster.run(script, 200)
        eventually(lambda: job.history.step() >= 20, 60.0, "it steps")
        nodes = {commit.rank: commit.node for commit in job.history.commits}
        own = next(node for node in cluster.nodes if node.name == nodes[1])
        other = next(node for node in cluster.nodes if node is not own)
        code, said = fault(other, "job", "kill", "--rank", "1")
        assert (code, f"rank 1 runs on node '{own.name}'" in said) == (1, True), said
        strike = "job", "kill", "--rank", "1", "--step", "100", "--place", "backward"
        code, said = eventually(lambda: r if "try again" not in (r := fault(own, *strike))[1] else None, 20.0, "rank 1")
        assert (code, f"of job at step 100, in its backward: added to {job.plan}" in said) == (0, True), said
        assert job.wait(60.0) == "succeeded"
        (struck,) = job.struck()
        assert isinstance(struck.fault, testing.Kill)
        job.faults = (struck.fault,)
        assert not [str(each) for each in testing.judge(job)]
        plain = cluster.run(script, 2000, name="plain", preload=[])
        eventually(lambda: (plain.row().get("step") or 0) >= 10, 60.0, "it steps")
        codes = [fault(node, "plain", "kill", "--rank", "1")[0] for node in cluster.nodes]
        assert sorted(codes) == [0, 1]
        eventually(plain.incidents, 20.0, "it is told")
        (told,) = plain.incidents()
        assert (told["kind"], told["ranks"], "SIGKILL" in told["detail"]) == ("exit", [1], True)  # type: ignore[index]
        events = cluster.client().get("/v1/events", {"job": "plain"})["events"]
        (asked,) = [event for event in events if event["kind"] == "job.fault_requested"]
        assert (asked["user"], "do = 'kill', rank = 1" in asked["text"]) == (getpass.getuser(), True)
        cluster.client().post("/v1/jobs/plain/stop", {})
