"""What elasticctl on one node learns of another: logs, stacks and the doctor's findings, through etcd."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from support.daemons import Node, Nodes
from support.wait import eventually

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Node, Node]]:
    """Two daemons, and a job on the first, whose agent is a stand-in."""
    with Nodes() as nodes:
        a = nodes.add("a", slots=2)
        b = nodes.add("b", etcd__endpoints=f"unix:{a.state}/etcd/client:0")
        eventually(lambda: len(b.get("/v1/nodes")["nodes"]) == 2, 10)
        a.post("/v1/nodes/b/cordon", {"reason": "not there"})
        a.submit("train", fake={}, workers_per_node=1)
        eventually(lambda: a.agent_pid("train"), 10)
        eventually(lambda: b.job("train")["ranks"] or b.ctl("stacks", "train", "--json").returncode == 0, 20)
        yield a, b


def test_logs_of_a_job_on_another_node(two: tuple[Node, Node]) -> None:
    a, b = two
    folder = a.state / "jobs" / "train" / "logs"
    folder.mkdir(exist_ok=True)
    (folder / "slot7.aaaa.0001.log").write_text("first life\n")
    (folder / "slot7.aaaa.0002.log").write_text("second life\nmore\n")
    os.utime(folder / "slot7.aaaa.0001.log", (1000, 1000))

    def of_slot_7(*words: str) -> list[str]:
        done = b.ctl("logs", "train", *words)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("[slot 7 a] ")]

    assert [line.partition("] ")[2] for line in of_slot_7("-n", "9999")] == ["first life", "second life", "more"]
    assert of_slot_7("--previous") == ["[slot 7 a] first life"]
    assert len(of_slot_7("--since", "10m", "-n", "9999")) == 2
    assert len(b.ctl("logs", "train", "-n", "1").stdout.splitlines()) == 1


def test_stacks_of_a_job_on_another_node_are_asked_of_it(two: tuple[Node, Node]) -> None:
    _, b = two
    done = b.ctl("stacks", "train", "--json")
    data = json.loads(done.stdout)
    assert not data["unanswered"]
    assert {row["node"] for row in data["stacks"]} == {"a"}


def test_doctor_asks_all_nodes(two: tuple[Node, Node]) -> None:
    _, b = two
    done = b.ctl("doctor", "--json")
    assert done.stdout, done.stderr + b.log.read_text()[-3000:]
    data = json.loads(done.stdout)
    assert set(data["versions"]) == {"a", "b"}
    reach = [row for row in data["findings"] if row["check"] == "reach"]
    assert [(row["node"], row["level"]) for row in reach] == [("a", "ok")]
    assert done.returncode == {"ok": 0, "warning": 3, "error": 1}[data["worst"]]
    etcd = [row for row in data["findings"] if row["check"] == "etcd"]
    assert {row["node"] for row in etcd} >= {"a", "b"}, "each node measures its own way to etcd"


def test_config_diff_compares_all_nodes(two: tuple[Node, Node]) -> None:
    _, b = two
    done = b.ctl("config", "diff", "--json")
    data = json.loads(done.stdout)
    assert (data["differences"], data["unanswered"], done.returncode) == ({}, {}, 0)
    every = json.loads(b.ctl("config", "diff", "--json", "--all").stdout)
    assert every["differences"]["node"] == {"a": ["a"], "b": ["b"]}
