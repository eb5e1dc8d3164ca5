"""A drain is over when nothing runs on the node any more: its daemon says which agents are there, and ends those that
stay beyond the deadline."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner
from support import plain_views
from support.door import Door
from support.snapshots import job, snapshot

from elastic.contract.agent_files import AgentConfig, AgentOrders, EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, SpecRecord, encode
from elastic.contract.records.node_records import DrainRecord
from elasticd.agents.agents import Running
from elasticd.api.views.instant import Identity, Now
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Cluster, Node
from elasticd.cluster.published_state import Snapshot
from elasticd.ctl import main as ctl

from .test_node_record import Daemon

KEYS = ClusterKeys("main")
DRAIN = DrainRecord(reason="reboot", since_wall_s=1.0)


def seen(**facts: object) -> Snapshot:
    """Node a with a drain, and with `facts` in its record."""
    base = snapshot()
    record = msgspec.structs.replace(base.cluster.nodes["a"].record, **facts)
    cluster = replace(base.cluster, nodes={"a": Node(record, 1, drain=DRAIN)}, drains={"a": DRAIN})
    return replace(base, cluster=cluster)


@pytest.mark.parametrize(
    ("facts", "empty"),
    [
        ({"draining": "reboot"}, True),
        ({"draining": "reboot", "jobs": ("train",)}, False),  # starting, frozen or leaving: no member of the job
        ({}, False),  # its daemon has not seen the drain: it may just be starting one
        ({"draining": "an earlier one"}, False),
    ],
)
def test_a_drained_node_is_empty_when_its_daemon_says_so(facts: dict[str, object], empty: bool) -> None:
    cluster = seen(**facts).cluster
    assert cluster.is_empty("a") is empty
    member = replace(cluster, jobs={"train": replace(job(), members={"a": job().members["a"]})})
    assert not member.is_empty("a")
    assert Cluster().is_empty("a")


def test_an_agent_process_that_is_no_member_is_shown_on_its_node() -> None:
    identity = Identity("main", "a", "0.1", 7, 40.0, (), False, "")
    (row,) = plain_views.status(seen(draining="reboot", jobs=("train",)), identity, Now(100.0, 1000.0))["nodes"]
    assert (row["jobs"], row["slots_used"]) == (["train"], 0)
    assert row["why"].endswith("reboot; train still here")


@pytest.fixture
def door(tmp_path: pathlib.Path) -> Iterator[Door]:
    there = Door(tmp_path)
    (tmp_path / "jobs").mkdir()
    yield there
    there.close()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"draining": "reboot"}, "a is drained: no agent runs there"),
        ({"draining": "reboot", "jobs": ("train",)}, "a still has train after 0.001 s; the drain goes on"),
        ({}, "a has not seen the drain after 0.001 s; the drain goes on"),
    ],
)
def test_drain_wait_does_not_say_that_nothing_runs_while_agents_live(
    door: Door, facts: dict[str, object], said: str
) -> None:
    door.published.publish(seen(**facts))
    done = CliRunner().invoke(ctl.main, ["--socket", str(door.path), "drain", "a", "--wait", "--timeout", "0.001s"])
    assert (done.output.splitlines()[-1], done.exit_code) == (said, 0 if "no agent" in said else 1)


@pytest.mark.parametrize(("deadline_s", "killed"), [(30.0, True), (0.0, False)])
def test_an_agent_that_stays_beyond_the_deadline_is_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float, killed: bool
) -> None:
    """Frozen, it follows no order."""
    daemon = Daemon(tmp_path, monkeypatch)
    daemon.settle()
    spec = SpecRecord(spec=JobSpec(name="train", script="/t.py", nodes="1:1"), submitted_wall_s=9.0, submitted_by="me")
    daemon.client.put(KEYS.job("train").spec, encode(spec))
    daemon.client.put(KEYS.job("train").state, encode(JobState(phase=Phase.RUNNING)))
    config = AgentConfig(
        cluster="main", node="a", job="train", address="h", slots=1, etcd=EtcdAccess(endpoints=()),
        agent_dir=str(tmp_path), logs_dir=str(tmp_path),
    )  # fmt: skip
    agents, sent = daemon.loop.agents, list[tuple[float, signal.Signals]]()
    agents.running["train"] = Running(config, 4, time.monotonic(), orders=AgentOrders(draining="reboot"))
    for name in ("refresh", "order"):
        monkeypatch.setattr(agents, name, lambda *_: None)
    monkeypatch.setattr(agents, "signal", lambda job, number: sent.append((daemon.now_s - began_s, number)))
    daemon.client.put(KEYS.drain("a"), encode(msgspec.structs.replace(DRAIN, deadline_s=deadline_s)))
    daemon.turn()
    began_s = daemon.now_s
    daemon.write()
    daemon.settle()
    assert (daemon.record.jobs, daemon.record.draining) == (("train",), "reboot")
    grace_s = spec.spec.stop_grace_s + reconcile.END_AFTER_S
    while daemon.now_s - began_s < 40.0 + 2 * grace_s:
        daemon.turn()
        daemon.write()
    assert {number for _, number in sent} == ({signal.SIGKILL} if killed else set())
    if killed:
        assert 30.0 + grace_s < sent[0][0] < 45.0 + grace_s
    del cast(Any, agents).running["train"]
    daemon.settle()
    assert daemon.record.jobs == ()
