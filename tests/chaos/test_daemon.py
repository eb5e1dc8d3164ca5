"""What happens to elasticd's files, disk, descriptors and code: no worker notices, it says what is wrong, and is well
again when the cause is gone (G5)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import resource
import shutil
import threading
from collections.abc import Iterator

import pytest
from chaos.harness import Cluster, Job, Node, now_s
from support.api import ApiError
from support.procs import kill
from support.source import ROOT
from support.wait import eventually

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def steps_on(job: Job, more: int = 20) -> None:
    there = job.history.step()
    eventually(lambda: job.history.step() >= there + more, 30.0, f"{more} steps after {there}")


def row(cluster: Cluster, node: Node) -> dict[str, object]:
    """The node as the other nodes see it."""
    rows: list[dict[str, object]] = cluster.nodes[0].api("GET", "/v1/nodes")["nodes"]
    return next(r for r in rows if r["node"] == node.name)


def the_agent_it_knows(node: Node) -> int:
    """0 while it knows none, or cannot be asked yet, or has not seen etcd yet."""
    try:
        agent = node.api("GET", "/v1/jobs/job")["agent"]
    except (OSError, ApiError):
        return 0
    return int(agent["pid"] or 0) if agent else 0


@pytest.mark.long
def test_damaged_files_and_other_code() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=100_000, pace_s=0.03)
        job.wait_step(20)
        workers = job.workers()
        damaged, upgraded = cluster.nodes
        agents = {node.name: node.agent_pid() for node in cluster.nodes}

        damaged.kill_daemon()
        folder = damaged.folder / "state" / "jobs" / "job" / "agent"
        for name in ("config.json", "orders.json", "status.json"):
            (folder / name).write_bytes(b'{"protocol": 7, "jo\xff')
        (damaged.folder / "state" / "jobs" / "rubbish").write_text("a file where folders are")
        damaged.start()
        eventually(lambda: the_agent_it_knows(damaged) == agents[damaged.name], 10.0, "its agent is found again")
        assert any(e["event"] == "agent.unreadable" for e in damaged.events())
        steps_on(job)

        code = cluster.folder / "code"
        shutil.copytree(ROOT / "elastic", code / "elastic")
        shutil.copytree(ROOT / "daemon", code / "elasticd")
        about = code / "elastic" / "__init__.py"
        from elastic import __version__ as old

        assert f'"{old}"' in about.read_text()
        about.write_text(about.read_text().replace(f'"{old}"', '"99.0"'))
        assert upgraded.stop_daemon() == 0
        upgraded.start(code=code)
        eventually(lambda: row(cluster, upgraded)["version"] == "99.0", 10.0, "the other code runs")
        assert row(cluster, damaged)["version"] == old
        eventually(lambda: the_agent_it_knows(upgraded) == agents[upgraded.name], 10.0, "its agent is found again")
        steps_on(job)

        assert job.workers() == workers
        lost = Injection("lost", nodes=(upgraded.name,), struck_s=now_s())
        kill(upgraded.agent_pid())  # the next agent is of the new code, beside one of the old
        eventually(lambda: set(job.workers_of(2)) == {0, 1}, 60.0, "both step again")
        job.stop()
        job.check(lost)
        assert len(job.history.generations()) == 2
        assert upgraded.agent_pid() != agents[upgraded.name]


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    """Two nodes; the state of the second lies on a small disk of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with Cluster(nodes=2, slots=1, disks_mb={1: 64}) as made:
        yield made


@pytest.mark.long
def test_a_full_disk(cluster: Cluster) -> None:
    node = cluster.nodes[1]
    job = cluster.submit(steps=100_000, pace_s=0.03)
    job.wait_step(20)
    workers, agent = job.workers(), node.agent_pid()
    ballast = fill(node.folder / "state")
    eventually(lambda: row(cluster, node)["state"] == "unhealthy", 15.0, "it says that it is not well")
    assert re.search(r"has \d+ MB left, 50 MB are needed", str(row(cluster, node)["reason"]))
    steps_on(job, 100)
    node.kill_daemon()
    node.start(wait=False)
    eventually(lambda: the_agent_it_knows(node) == agent, 15.0, "a daemon that starts meanwhile finds its agent")
    steps_on(job)
    assert job.workers() == workers
    assert job.history.generations() == [1]

    killed = Injection("exit", pids=(job.worker_on(node),), struck_s=now_s())
    kill(*killed.pids)
    eventually(lambda: set(job.workers_of(2)) == {0, 1}, 20.0, "a worker that dies meanwhile is replaced")
    assert node.agent_pid_by_lock() == agent
    ballast.unlink()
    eventually(lambda: row(cluster, node)["state"] == "ready", 15.0, "there is room again")
    job.stop()
    assert job.check(killed).generations() == [1, 2]


def fill(folder: pathlib.Path) -> pathlib.Path:
    """Until not one byte is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    disk = os.statvfs(folder)
    assert disk.f_bavail == 0
    return ballast


@pytest.mark.long
def test_no_descriptors_left() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        node = cluster.nodes[1]
        job = cluster.submit(steps=100_000, pace_s=0.03)
        job.wait_step(20)
        agent, survivor = node.agent_pid(), job.worker_on(cluster.nodes[0])
        assert node.daemon is not None
        before = resource.prlimit(node.daemon.pid, resource.RLIMIT_NOFILE)
        # All numbers below are in use. Not 0: poll(2) refuses to look at more descriptors than there may be.
        resource.prlimit(node.daemon.pid, resource.RLIMIT_NOFILE, (4, before[1]))
        eventually(lambda: row(cluster, node)["state"] == "unhealthy", 15.0, "it says that it is not well")
        assert "no file descriptors" in str(row(cluster, node)["reason"])
        answers: list[dict[str, object]] = []
        caller = threading.Thread(target=lambda: answers.append(node.api("GET", "/v1/nodes", timeout_s=60.0)))
        caller.start()  # knocks, and waits
        eventually(lambda: any(e["event"] == "api.cannot_accept" for e in node.events()), 10.0, "it cannot answer")
        lost = Injection("lost", nodes=(node.name,), struck_s=now_s())
        kill(agent)  # and no other can be started
        eventually(lambda: any(e["event"] == "agent.trouble" for e in node.events()), 10.0)
        steps = job.history.step()

        resource.prlimit(node.daemon.pid, resource.RLIMIT_NOFILE, before)
        caller.join(30.0)
        assert answers, "a request made meanwhile is answered"
        eventually(lambda: row(cluster, node)["state"] == "ready", 15.0, "it is well again")
        eventually(lambda: set(job.workers_of(2)) == {0, 1}, 60.0, "the agent is started")
        job.stop()
        history = job.check(lost)
        assert history.step() > steps
        assert survivor in job.workers().values()
        assert history.generations() == [1, 2]
