"""Nodes whose GPU falls ill, or is not rid of the dead: the real thing but for NVML, which is a stand-in."""

from __future__ import annotations

import pathlib

import pytest
from chaos.harness import Cluster
from support.forge import LATE
from support.procs import alive, kill
from support.wait import eventually, holds

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.fixture
def card(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder that says what the cards do; see support/one_gpu."""
    site = pathlib.Path(__file__).parents[1] / "support" / "one_gpu"
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.setenv(LATE, str(site))  # NVML is imported when it is used
    monkeypatch.setenv("ONE_GPU", str(tmp_path))
    return tmp_path


def order(card: pathlib.Path, name: str, content: str) -> None:
    (card / "half").write_text(content)
    (card / "half").rename(card / name)


def test_node_with_a_failing_gpu_is_left_without_lost_steps_and_with_the_reason(card: pathlib.Path) -> None:
    """Its worker still has its state: the job leaves at a boundary, and not a step is lost."""
    with Cluster(nodes=2, slots=1) as cluster:
        sick = cluster.nodes[1]
        job = cluster.submit(nodes="1:2", steps=100_000, backend="gloo")
        job.wait_step(10)
        assert set(job.workers()) == {0, 1}
        order(card, "xid.node1", "31")  # a program's own
        eventually(lambda: [e for e in sick.events() if e["event"] == "gpu.xid"], 10.0, "it is logged")
        there = job.history.step()
        job.wait_step(there + 5)
        assert not job.incidents()
        order(card, "xid.node1", "79")
        eventually(lambda: sick.daemon and sick.pids() == [sick.daemon.pid], 20.0, "its agent and worker are gone")
        eventually(job.incidents, 20.0, "the planned change")
        row = next(row for row in cluster.api("GET", "/v1/nodes")["nodes"] if row["node"] == "node1")
        assert row["state"] in ("unhealthy", "draining")
        assert "GPU 0: XID 79, fallen off the bus" in row["reason"]
        there = job.history.step()
        job.wait_step(there + 10)
        assert job.history.of(job.history.generations()[-1])[0].world_size == 1
        job.stop()
        job.check(Injection("planned", words=("GPU 0: XID 79, fallen off the bus",)), lost=0)


def test_a_node_that_fails_its_self_test_gets_no_work(card: pathlib.Path) -> None:
    order(card, "selftest.node1", "cuda:0: 3 of 8 words came back changed from a copy")
    with Cluster(nodes=2, slots=1, unfit=("node1",)) as cluster:
        bad = cluster.nodes[1]
        row = eventually(
            lambda: [r for r in cluster.api("GET", "/v1/nodes")["nodes"] if "3 of 8 words" in (r["reason"] or "")],
            20.0, "its self-test has failed",
        )[0]  # fmt: skip
        assert row["node"] == "node1"
        assert row["state"] in ("unhealthy", "draining")
        job = cluster.submit(nodes="1:2", steps=100_000, backend="gloo", join_wait_s=1.0)
        job.wait_step(10)
        assert set(job.workers()) == {0}
        assert bad.daemon is not None
        assert bad.pids() == [bad.daemon.pid]


@pytest.mark.long
def test_replacement_worker_waits_for_gpu_memory_release_at_most_respawn_s(card: pathlib.Path) -> None:
    with Cluster(nodes=1, slots=2, timeouts={"respawn_s": 4.0}) as cluster:
        job = cluster.submit(nodes="1", steps=100_000, backend="gloo")
        job.wait_step(10)
        (node,) = cluster.nodes
        zygote = node.children()[0]

        def workers() -> list[int]:
            return [pid for pid in node.children() if pid != zygote and alive(pid)]

        first = workers()
        assert len(first) == 2
        order(card, "held.node0", str(first[0]))
        kill(first[0])
        eventually(lambda: workers() == first[1:], 5.0, "it is dead")
        holds(lambda: workers() == first[1:], 1.5, "its card is not free")  # without, a worker is there in 0.2 s
        (card / "held.node0").unlink()
        eventually(lambda: len(workers()) == 2, 5.0, "its replacement comes")
        eventually(lambda: len(job.incidents()) == 1, 10.0, "recovery")
        second = workers()
        order(card, "held.node0", str(second[0]))
        kill(second[0])
        eventually(lambda: len(job.incidents()) == 2, 20.0, "recovery, with the zombie on the card")
        assert [i["steps_lost"] for i in job.incidents()] == [0, 0]
        assert job.incidents()[1]["timeline_s"]["stepping"] >= 4.0
        log = (node.folder / "state" / "jobs" / "job" / "agent" / "agent.log").read_text()
        (zombie,) = [line for line in log.splitlines() if '"gpu.zombie"' in line]
        assert f'"pid": {second[0]}' in zombie
        job.stop()
        job.check(lost=0)
