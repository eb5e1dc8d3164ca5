"""Stock torchrun with a script that knows nothing of us: real agents, real workers, gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import procs
from support.etcd_server import EtcdServer, etcd_binary
from support.procs import Procs
from support.wait import eventually

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.chaos]

SCRIPT = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist

folder, want_world = pathlib.Path(sys.argv[1]), int(sys.argv[2])
leaked = sorted({"GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"} & set(os.environ))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
def say(event, **more):
    line = json.dumps({"event": event, "rank": rank, "world_size": world, "pid": os.getpid(),
        "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "leaked": leaked, **more})
    with open(folder / "events", "a") as file:
        file.write(line + "\\n")
for step in range(100000):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world
    if step == 0:
        say("first step")
    if rank == 0 and (folder / f"fail-{os.environ['TORCHELASTIC_RESTART_COUNT']}").exists():
        raise SystemExit(3)
    stop = torch.tensor([float((folder / "stop").exists() and world == want_world)])
    dist.broadcast(stop, 0)
    if stop.item():
        break
    time.sleep(0.02)
say("done")
dist.destroy_process_group()
"""


class Lab:
    def __init__(self, server: EtcdServer, folder: Path, started: Procs) -> None:
        self.server = server
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self._procs = started
        self._count = 0

    def agent(
        self, nodes: str, workers: int, want_world: int, lease_s: int = 2, timeout_s: int = 40, restarts: int = 3
    ) -> subprocess.Popen[bytes]:
        """One torchrun. Its output goes to `agent-N.log`."""
        self._count += 1
        argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={workers}"]
        argv += ["--rdzv-backend=elastic", f"--rdzv-endpoint={self.server.endpoint}", "--rdzv-id=stock"]
        argv += [f"--rdzv-conf=lease_ttl={lease_s},last_call_timeout=0.5,timeout={timeout_s}"]
        argv += [f"--max-restarts={restarts}"]
        argv += ["--local-addr=127.0.0.1", str(self.script), str(self.folder), str(want_world)]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"agent-{self._count}.log").open("wb") as log:
            return self._procs.popen(argv, env=env, stdout=log, stderr=log)

    def events(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [said for line in lines if (said := json.loads(line))["event"] == event]

    def stepped(self, world_size: int, count: int) -> list[dict[str, Any]]:
        """Wait until `count` workers have stepped in a world of this size."""

        def there() -> list[dict[str, Any]]:
            found = [said for said in self.events("first step") if said["world_size"] == world_size]
            return found if len(found) >= count else []

        try:
            return eventually(there, 45, f"{count} workers step in a world of {world_size}", 0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def finish(self) -> None:
        (self.folder / "stop").touch()

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("agent-*.log")))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with EtcdServer() as server, Procs() as started:
        yield Lab(server, tmp_path, started)


def test_two_nodes_a_failing_worker_and_a_clean_end(lab: Lab) -> None:
    agents = [lab.agent("2", 1, want_world=2) for _ in range(2)]
    first = lab.stepped(2, 2)
    assert {said["rank"] for said in first} == {0, 1}
    assert not any(said["leaked"] for said in first), "our settings of gRPC stay out of the workers"
    (lab.folder / "fail-0").touch()
    lab.stepped(2, 4)
    lab.finish()
    assert [agent.wait(30) for agent in agents] == [0, 0], lab.logs()
    assert len(lab.events("done")) == 2
    assert (
        subprocess.check_output(
            [*_etcdctl(lab.server), "get", "--prefix", "/elastic/", "--keys-only"], text=True, timeout=60
        ).strip()
        == ""
    ), "nothing is left in etcd"


@pytest.mark.long
def test_a_late_joiner_and_then_the_loss_of_the_first_node_with_its_store(lab: Lab) -> None:
    first = lab.agent("1:2", 1, want_world=1)
    alone = lab.stepped(1, 1)
    second = lab.agent("1:2", 1, want_world=1)
    both = lab.stepped(2, 2)
    [leads] = [said for said in both if said["rank"] == 0]
    assert alone[0]["pid"] not in {said["pid"] for said in both}
    assert _parent(leads["pid"]) == first.pid, "the first agent keeps rank 0"
    first.send_signal(signal.SIGKILL)
    procs.kill(leads["pid"])  # stock torchrun leaves its workers behind
    assert first.wait(60) == -signal.SIGKILL
    lab.stepped(1, 2)
    lab.finish()
    assert second.wait(30) == 0, lab.logs()


@pytest.mark.long
def test_a_node_ended_by_sigterm_is_done_without_at_once(lab: Lab) -> None:
    agents = [lab.agent("1:2", 1, want_world=1, lease_s=60) for _ in range(2)]
    lab.stepped(2, 2)
    agents[1].send_signal(signal.SIGTERM)
    assert agents[1].wait(20) != 0
    assert not [m for m in _members(lab.server) if f"-{agents[1].pid}-" in m], "it has said good-bye"
    lab.stepped(1, 1)
    lab.finish()
    assert agents[0].wait(30) == 0, lab.logs()


@pytest.mark.long
def test_a_spare_waits_and_takes_the_place_of_a_lost_node(lab: Lab) -> None:
    agents = [lab.agent("2:2", 1, want_world=2) for _ in range(3)]
    first = lab.stepped(2, 2)
    eventually(lambda: len(_members(lab.server)) == 3, 20, "the third node is registered")
    running = {_parent(said["pid"]): said["pid"] for said in first}
    [spare] = [agent for agent in agents if agent.pid not in running]
    assert spare.poll() is None
    assert len(lab.events("first step")) == 2, "nobody was restarted for it"
    victim = next(agent for agent in agents if agent is not spare)
    victim.send_signal(signal.SIGKILL)
    procs.kill(running[victim.pid])
    assert victim.wait(60) == -signal.SIGKILL
    again = lab.stepped(2, 4)[2:]
    assert spare.pid in {_parent(said["pid"]) for said in again}
    lab.finish()
    assert [agent.wait(30) for agent in agents if agent is not victim] == [0, 0], lab.logs()


@pytest.mark.long
def test_torchrun_with_too_few_nodes_times_out_and_names_what_is_missing(lab: Lab) -> None:
    alone = lab.agent("2:3", 1, want_world=2, timeout_s=3)
    assert alone.wait(40) == 1, lab.logs()
    assert "RendezvousTimeoutError" in lab.logs()
    assert "1 of at least 2 nodes" in lab.logs()
    assert not lab.events("first step")


@pytest.mark.long
def test_a_node_out_of_restarts_does_not_close_the_run_for_the_others(lab: Lab) -> None:
    failing = lab.agent("1:2", 1, want_world=1, restarts=1)
    lab.stepped(1, 1)
    other = lab.agent("1:2", 1, want_world=1, restarts=100)
    lab.stepped(2, 2)
    for count in range(2):  # one more than it may restart; rank 0 is its worker
        (lab.folder / f"fail-{count}").touch()
    assert failing.wait(60) == 1, lab.logs()
    for count in range(2):
        (lab.folder / f"fail-{count}").unlink()
    alone = lab.stepped(1, 2)[-1]
    assert _parent(alone["pid"]) == other.pid
    lab.finish()
    assert other.wait(30) == 0, lab.logs()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _etcdctl(server: EtcdServer) -> list[str]:
    binary = etcd_binary()
    assert binary is not None
    return [os.path.join(os.path.dirname(binary), "etcdctl"), f"--endpoints={server.endpoint}"]


def _members(server: EtcdServer) -> list[str]:
    argv = [*_etcdctl(server), "get", "--prefix", "/elastic/torchrun/jobs/stock/members/", "--keys-only"]
    return subprocess.check_output(argv, text=True, timeout=60).split()
