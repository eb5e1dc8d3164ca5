"""What a node says of itself gets to etcd, also where that did not take it at first."""

from __future__ import annotations

import pathlib
import time
from typing import cast

import msgspec
import pytest
import structlog
from support.accounts import own_user
from support.fake_etcd import FakeClient, FakeServer

from elastic.contract.agent_files import AgentConfig, AgentStatus, EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, SpecRecord, decode, encode
from elastic.contract.records.node_records import NodeRecord
from elastic.contract.records.reasons import Code, codes
from elastic.etcd.client import Delete, Etcd
from elasticd.agents.agents import Agents, Running
from elasticd.base.sd_notify import Notify
from elasticd.base.settings import Settings
from elasticd.base.threads import Threads
from elasticd.cluster.published_state import PublishedState
from elasticd.machine import host
from elasticd.machine.health import Health
from elasticd.machine.processes.launch import Detached
from elasticd.node.chores import ALARMS_S
from elasticd.node.event_queue import EventQueue
from elasticd.node.loop import RETRY_S, DaemonLoop
from elasticd.node.older_records import SIGN_S
from elasticd.node.writer import ClusterWriter

KEY = ClusterKeys("main").node("a")


class Daemon:
    """A loop and its writer on an etcd in memory; both move when the test says so."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sick = ""
        monkeypatch.setattr(host.StateFolder, "look", lambda _: self.sick)
        log = structlog.get_logger()
        settings = host.complete(Settings(node="a", state_dir=str(folder), slots=2), ())
        self.health = Health({"state_dir": host.StateFolder(str(folder))}, log)
        self.server = FakeServer()
        self.client = FakeClient(self.server)
        self.event_queue = EventQueue()
        self.writer = ClusterWriter(cast(Etcd, self.client), ClusterKeys("main"), self.event_queue, log)
        agents = Agents(folder, Detached(), Threads(log), self.event_queue.post, log)
        self.loop = DaemonLoop(
            settings, EtcdAccess(endpoints=("127.0.0.1:1",)), (), self.event_queue, self.writer, agents,
            PublishedState(), Notify(""), log, self.health, own_user(),
        )  # fmt: skip
        self.client.watch("/elastic/main/", self.event_queue.show)
        self.now_s = time.monotonic()

    def turn(self) -> None:
        """One of the loop's, some time after the one before."""
        self.now_s += max(RETRY_S, ALARMS_S) + 1.0
        self.health.watches[0].turn()
        self.client.pump()
        events, view = self.event_queue.take(0)
        for event in events:
            self.loop._hear(event)
        if view is not None:
            self.loop._look(view)
        self.loop._work(self.now_s)

    def write(self) -> None:
        """What the writer has to do."""
        while not self.writer._work.empty():
            self.writer.run_one()

    def settle(self) -> None:
        for _ in range(4):
            self.turn()
            self.write()

    @property
    def record(self) -> NodeRecord:
        return decode(NodeRecord, self.server.kvs[KEY].value)


@pytest.fixture
def daemon(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    made = Daemon(tmp_path, monkeypatch)
    made.settle()
    assert made.record.healthy
    return made


def test_a_change_that_etcd_did_not_take_is_written_again(daemon: Daemon) -> None:
    daemon.sick = "its disk is full"
    daemon.turn()
    daemon.client.cut()  # for less than a lease: nobody registers anew
    daemon.write()
    daemon.client.heal()
    assert daemon.record.healthy
    daemon.settle()
    assert daemon.record.reason == "its disk is full"


def test_another_record_in_the_place_of_ones_own_is_replaced(daemon: Daemon) -> None:
    """An old one, say, in which the node drains: after `uncordon` it takes work, whatever stands there."""
    old = msgspec.structs.replace(daemon.record, draining="drained by root")
    daemon.client.put(KEY, encode(old))
    daemon.settle()
    assert daemon.record.draining is None
    daemon.client.put(KEY, encode(old), lease=0)
    for _ in range(2):
        daemon.settle()
    assert (daemon.record.draining, daemon.server.kvs[KEY].lease) == (
        None,
        daemon.loop._lease and daemon.loop._lease.id,
    )


def test_the_own_record_is_signed_anew_every_few_minutes(daemon: Daemon) -> None:
    before = daemon.server.kvs[KEY].mod_revision
    daemon.settle()
    assert daemon.server.kvs[KEY].mod_revision == before
    daemon.now_s += SIGN_S
    daemon.settle()
    assert daemon.server.kvs[KEY].mod_revision > before


def test_node_record_change_during_a_pending_write_is_written_too(daemon: Daemon) -> None:
    daemon.sick = "its disk is full"
    daemon.turn()
    daemon.sick = ""
    daemon.turn()  # the writer has not come to the first yet
    daemon.write()
    assert not daemon.record.healthy
    daemon.settle()
    assert daemon.record.healthy


def test_etcd_version_lookup_is_retried_until_a_member_answers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what keeps a daemon from an etcd that loses data."""
    daemon = Daemon(tmp_path, monkeypatch)
    asked = []
    members = daemon.client.members
    monkeypatch.setattr(daemon.client, "members", lambda: asked.append(1) or [m for m in members() if len(asked) > 2])
    daemon.settle()
    daemon.settle()
    assert daemon.writer.version == "3.5.1"
    assert len(asked) == 3


def test_node_publishes_which_jobs_it_does_not_run_and_starts_no_agent_of_them(daemon: Daemon) -> None:
    keys = ClusterKeys("main").job("hers")
    spec = SpecRecord(
        spec=JobSpec(name="hers", script="/t.py", workers_per_node=1), submitted_wall_s=0.0, submitted_by="alice",
        uid=4_000_000, gid=1, user="alice",
    )  # fmt: skip
    daemon.client.put(keys.spec, encode(spec))
    daemon.client.put(keys.state, encode(JobState(phase=Phase.PENDING)))
    daemon.settle()
    assert codes(daemon.record.refuses["hers"]) == {Code.OTHER_ACCOUNT}
    assert not daemon.loop.agents.running
    assert not daemon.loop.agents.trouble, "no agent was tried"
    daemon.client.txn([], [Delete(keys.root, prefix=True)])
    daemon.settle()
    assert daemon.record.refuses == {}


def test_records_that_could_not_be_read_are_forgotten_with_their_keys(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's user can write other keys of that kind without end, and every daemon of the cluster reads them."""
    made = Daemon(tmp_path, monkeypatch)
    incidents = ClusterKeys("main").job("j").incidents
    for number in range(20):
        made.client.put(f"{incidents}{number}", b"no record")
        made.turn()
        made.client.delete(f"{incidents}{number}")
        made.turn()
    assert not [about for about in made.loop._said if about.startswith("record ")]
    made.client.put(f"{incidents}1", b"no record")
    made.turn()
    assert [about for about in made.loop._said if about.startswith("record ")] == [f"record {incidents}1"]


@pytest.mark.parametrize(("submitted_wall_s", "ended"), [(5.0, True), (9.0, False), (11.0, False), (0.0, False)])
def test_an_agent_of_an_earlier_job_of_the_name_is_ended(
    daemon: Daemon, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, submitted_wall_s: float, ended: bool
) -> None:
    """It was cut off from etcd while its job was stopped, and the new one waits for its place."""
    job = ClusterKeys("main").job("train")
    spec = SpecRecord(spec=JobSpec(name="train", script="/t.py", nodes="1:1"), submitted_wall_s=9.0, submitted_by="me")
    daemon.client.put(job.spec, encode(spec))
    daemon.client.put(job.state, encode(JobState(phase=Phase.PENDING)))
    config = AgentConfig(
        cluster="main", node="a", job="train", address="h", slots=1, etcd=EtcdAccess(endpoints=()),
        agent_dir=str(tmp_path), logs_dir=str(tmp_path),
    )  # fmt: skip
    said = AgentStatus(
        pid=4, incarnation="i", job="train", node="a", phase="running", reason="", leader=True, generation=3,
        etcd_ok=True, written_wall_s=0.0, submitted_wall_s=submitted_wall_s,
    )  # fmt: skip
    agents = daemon.loop.agents
    agents.running["train"] = Running(config, 4, time.monotonic(), status=said)
    signalled: list[str] = []
    monkeypatch.setattr(agents, "signal", lambda name, number: signalled.append(name))
    for _ in range(20):
        daemon.turn()
    assert set(signalled) == ({"train"} if ended else set())
