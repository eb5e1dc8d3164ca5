"""The manifests of one job on Kubernetes: what its pods run, as processes of this machine; and the schema."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.procs import Procs
from support.scripts import TINY, TINY_STEP
from support.source import ROOT
from support.wait import eventually

FOLDER = ROOT / "deploy" / "kubernetes"
EXAMPLE = ROOT / "examples" / "kubernetes"
POD = FOLDER / "job" / "pod.sh"

TRAIN = f"""{TINY}
    if job.rank == 0:
        print("entered at", state.step, flush=True)
        print(state.step, job.world_size, file=open("SHARED/entered", "a"))
    while not job.broadcast(os.path.exists("SHARED/end") if job.rank == 0 else None):
{TINY_STEP}"""


def own_address() -> str:
    """Of this machine, as other nodes reach it: much is allowed on loopback alone."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


class Pods:
    """The job's pods: each is a bash with pod.sh, and all that it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        (self.shared / "train.py").write_text(TRAIN.replace("SHARED", str(self.shared)))
        with socket.create_server(("", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = own_address()
        self._all: dict[str, Procs] = {}

    def start(self, name: str, **more: str) -> subprocess.Popen[bytes]:
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SHARED": str(self.shared),
            "STATE": str(self.folder / name), "HEAD": self.address, "PORT": str(self.port), "POD_IP": self.address,
            "NODE": name, "MIN_NODES": "1", "NODES": "2",
            "ARGS": f"--workers 1 {self.shared}/train.py", **more,
        }  # fmt: skip
        procs = self._all[name] = Procs()
        with (self.folder / f"{name}.out").open("ab") as out:
            return procs.popen(["bash", POD, name.partition("-")[0]], stdout=out, stderr=out, env=env, cwd=self.folder)

    def daemon(self, name: str) -> int:
        """Process id of its elasticd; 0: it has not begun."""
        lock = self.folder / name / "lock"
        return int(lock.read_text() or 0) if lock.exists() else 0

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def entered(self) -> list[tuple[int, int]]:
        """(step, world size) of each entry of `train`."""
        path = self.shared / "entered"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), int(size)) for step, size in (line.split() for line in lines)]

    def last(self) -> tuple[int, int]:
        return self.entered()[-1] if self.entered() else (0, 0)

    def kill(self, name: str) -> None:
        self._all.pop(name).close()

    def close(self) -> None:
        for name in list(self._all):
            self.kill(name)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    try:
        yield pods
    finally:
        pods.close()


@pytest.mark.long
@pytest.mark.etcd
@pytest.mark.timeout(300)
def test_job_runs_on_its_pods_outlives_head_and_eviction_and_ends_them_all(pods: Pods) -> None:
    head = pods.start("head")
    nodes = {name: pods.start(name) for name in ("node-0", "node-1")}
    eventually(lambda: pods.last()[1] == 2, 90.0, "two nodes train")
    time.sleep(1.0)  # some steps

    nodes["node-1"].send_signal(signal.SIGTERM)  # as the kubelet does
    assert nodes["node-1"].wait(60) == 143, pods.said("node-1")
    eventually(lambda: pods.last()[1] == 1, 30.0, "one node goes on")
    assert pods.last()[0] > 0

    pods.kill("head")  # with its etcd
    head = pods.start("head")
    pods.kill("node-1")  # what a pod leaves behind is gone with it
    nodes["node-1"] = pods.start("node-1")
    eventually(lambda: pods.last()[1] == 2, 90.0, "two nodes train again")
    steps = [step for step, _ in pods.entered() if step]
    assert steps == sorted(steps), "nothing was done again"

    (pods.shared / "end").touch()
    assert head.wait(90) == 0, pods.said("head")
    assert "entered at" in pods.said("head")
    assert [node.wait(60) for node in nodes.values()] == [0, 0]
    assert {path.name for path in (pods.shared / ".elasticd").iterdir()} == {"checkpoints", "over"}  # no key


@pytest.mark.long
@pytest.mark.etcd
def test_an_elasticd_that_dies_is_started_again_and_training_is_not_affected(pods: Pods) -> None:
    running = [pods.start(name) for name in ("head", "node-0", "node-1")]
    eventually(lambda: pods.last()[1] == 2, 90.0, "two nodes train")
    before = pods.entered()
    for name in ("node-1", "head"):
        pid = pods.daemon(name)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda n=name, p=pid: pods.daemon(n) not in (0, p), 30.0, "another one runs")  # type: ignore[misc]
    time.sleep(2.0)  # longer than it would take to end
    assert pods.entered() == before
    (pods.shared / "end").touch()
    assert [pod.wait(90) for pod in running] == [0, 0, 0], pods.said("head")
    assert pods.entered() == before


@pytest.mark.long
@pytest.mark.etcd
def test_a_setting_that_one_pod_refuses_ends_the_job_with_the_reason(pods: Pods) -> None:
    head, other = pods.start("head"), pods.start("node-0")
    assert pods.start("node-1", ELASTICD_SLOTS="many").wait(90) == 1, pods.said("node-1")
    assert head.wait(90) == 4, pods.said("head")
    assert "pod.sh: node-1: elasticd cannot run here (exit code 78)" in pods.said("head")
    assert "slots" in pods.said("head").rpartition("node-1: elasticd cannot run here")[2]
    assert other.wait(60) == 0
    assert {path.name for path in (pods.shared / ".elasticd").iterdir()} <= {"checkpoints", "over"}


def documents() -> list[dict[str, Any]]:
    """All objects of the manifests; the job's and the example's also as kustomize makes them, if kubectl is there."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make test-compat")
    files = [path.read_text() for path in sorted(FOLDER.rglob("*.yaml")) if path.name != "kustomization.yaml"]
    if shutil.which("kubectl"):
        for folder in (FOLDER / "job", EXAMPLE):
            run = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
            files.append(run.stdout)
    return [document for text in files for document in yaml.safe_load_all(text)]


def test_manifests_are_valid_by_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate: make test-compat")
    found = documents()
    assert {"DaemonSet", "StatefulSet", "Job", "Service", "ConfigMap"} <= {document["kind"] for document in found}
    for document in found:
        validate.validate(document, validate.latest_version(), strict=True)


def test_pods_run_the_script_that_the_kustomization_ships() -> None:
    text = (FOLDER / "job" / "job.yaml").read_text()
    assert set(re.findall(r"/etc/elasticd-job/pod.sh, (\w+)", text)) == {"head", "node"}
    kustomization = (FOLDER / "job" / "kustomization.yaml").read_text()
    literals = dict(re.findall(r"- ([A-Z_]+)=([^#\n]*)", kustomization))
    used = set(re.findall(r"\$\{?(ARGS|NODES|MIN_NODES)\b", POD.read_text()))
    assert used == set(literals)
    assert re.findall(r"(?:completions|parallelism): (\d+)", text) == [literals["NODES"].strip()] * 2


def test_the_example_has_as_many_pods_as_its_job_has_nodes() -> None:
    text = (EXAMPLE / "kustomization.yaml").read_text()
    nodes = re.findall(r"[ \[]NODES=(\d+)", text)
    assert re.findall(r"/spec/(?:completions|parallelism), value: (\d+)", text) == nodes * 2
    literals = set(re.findall(r"\b([A-Z_]+)=", text))
    assert literals == set(re.findall(r"- ([A-Z_]+)=", (FOLDER / "job" / "kustomization.yaml").read_text()))
