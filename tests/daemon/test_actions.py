"""What people ask for, and what the daemon writes of itself, on an etcd in memory."""

from __future__ import annotations

from typing import cast

import pytest
import structlog
from support.fake_etcd import FakeClient, FakeServer

from elastic.core.keys import ClusterKeys
from elastic.core.records import (
    AskedRecord,
    Failure,
    JobState,
    MemberRecord,
    NodeRecord,
    Phase,
    SpecRecord,
    decode,
    encode,
)
from elastic.etcd import Etcd
from elasticd import actions
from elasticd.actions import Actions
from elasticd.cluster import Job, Reader
from elasticd.errors import Refused
from elasticd.event_queue import Event, EventQueue, LeaseLost, Registered, Stop, Written
from elasticd.published_state import PublishedState, Snapshot
from elasticd.writer import Writer

KEYS = ClusterKeys("main")
JOB = KEYS.job("j")
RAW = {"name": "j", "script": "/t.py"}
NODE = NodeRecord(
    node="a", hostname="h", address="10.0.0.1", slots=2, gpus=0, version="1", pid=1, started_wall_s=0.0
)  # fmt: skip


class WriteQueue:
    """Actions and a writer on one fake etcd; the board is never behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(actions, "SEEN_S", 0.0)
        self.server = FakeServer()
        self.client = FakeClient(self.server)
        etcd = cast(Etcd, self.client)
        self.board = PublishedState()
        self.actions = Actions(etcd, KEYS, self.board)
        self.mailbox = EventQueue()
        self.writer = Writer(etcd, KEYS, self.mailbox, structlog.get_logger())

    def state(self) -> JobState:
        return decode(JobState, self.server.kvs[JOB.state].value)

    def spec(self) -> SpecRecord:
        return decode(SpecRecord, self.server.kvs[JOB.spec].value)

    def put_phase(self, phase: Phase) -> None:
        self.client.put(JOB.state, encode(JobState(phase=phase)))

    def job(self) -> Job:
        return Reader(KEYS).read(self.server.kvs, 1).jobs["j"]

    def written(self) -> list[Event]:
        """Do the writer's next piece of work; what the loop hears of it."""
        self.writer.run_one()
        events, _ = self.mailbox.take(0)
        for event in events:
            if isinstance(event, Written):
                self.writer.written(event)
        return events


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> WriteQueue:
    return WriteQueue(monkeypatch)


def test_submit_writes_spec_and_state_at_once(desk: WriteQueue) -> None:
    assert desk.actions.submit(RAW, by="ada") == "j"
    assert (desk.spec().submitted_by, desk.state().phase) == ("ada", Phase.PENDING)
    spec, state = desk.server.kvs[JOB.spec], desk.server.kvs[JOB.state]
    assert spec.create_revision == state.create_revision, "one transaction"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"name": "j"}, "give exactly one of them"),
        (RAW | {"nodez": 1}, "did you mean 'nodes'"),
        (RAW | {"script": "t.py"}, "an absolute path is needed here"),
        (RAW | {"workdir": "w"}, "workdir = 'w': an absolute path"),
        (RAW | {"name": "a/b"}, "name = 'a/b': use 1 to 63"),
    ],
)
def test_a_wrong_job_is_refused(desk: WriteQueue, raw: dict[str, object], words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        desk.actions.submit(raw, by="x")
    assert refused.value.status == 400
    assert not desk.server.kvs


def test_a_name_is_taken_until_its_job_is_over_and_then_only_on_purpose(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    with pytest.raises(Refused, match="is there already and pending: stop it first"):
        desk.actions.submit(RAW, by="x", replace=True)
    desk.put_phase(Phase.SUCCEEDED)
    desk.client.put(JOB.incident(1), b"old")
    with pytest.raises(Refused, match="has succeeded: choose another name, or submit with --replace"):
        desk.actions.submit(RAW, by="x")
    desk.actions.submit(RAW, by="new", replace=True)
    assert (desk.spec().submitted_by, desk.state().phase) == ("new", Phase.PENDING)
    assert JOB.incident(1) not in desk.server.kvs


def test_stop_is_a_state_that_agents_see(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    desk.actions.stop("j", "enough")
    assert (desk.state().phase, desk.state().reason) == (Phase.STOPPING, "enough")
    desk.actions.stop("j", "again")
    assert desk.state().reason == "enough"
    desk.put_phase(Phase.FAILED)
    desk.actions.stop("j", "too late")
    assert desk.state().phase is Phase.FAILED


def test_scale_keeps_the_jobs_age(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    age = desk.server.kvs[JOB.spec].create_revision
    desk.actions.scale("j", "2:4")
    assert (desk.spec().spec.nodes, desk.server.kvs[JOB.spec].create_revision) == ("2:4", age)
    with pytest.raises(Refused, match="nodes = '4:2'"):
        desk.actions.scale("j", "4:2")


def test_requests_for_a_checkpoint_are_counted(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    for _ in range(3):
        desk.actions.checkpoint("j")
    assert decode(AskedRecord, desk.server.kvs[JOB.asked].value).checkpoint == 3


def test_only_a_job_that_is_over_is_forgotten(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    with pytest.raises(Refused, match="is not over"):
        desk.actions.forget("j")
    desk.put_phase(Phase.STOPPED)
    desk.actions.forget("j")
    assert not desk.server.kvs
    with pytest.raises(Refused, match="there is no job 'j'") as refused:
        desk.actions.forget("j")
    assert refused.value.status == 404


def test_job_state_update_keeps_concurrent_changes(desk: WriteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.actions.submit(RAW, by="x")
    get, rivals = desk.client.get, 2

    def rival(key: str) -> object:
        nonlocal rivals
        found = get(key)
        if key == JOB.state and rivals:
            rivals -= 1
            desk.client.put(key, encode(JobState(phase=Phase.RUNNING, restarts=7)))
        return found

    monkeypatch.setattr(desk.client, "get", rival)
    desk.actions.stop("j", "enough")
    assert (desk.state().phase, desk.state().restarts) == (Phase.STOPPING, 7)
    rivals = 99
    with pytest.raises(Refused, match="all the time") as refused:
        desk.actions.stop("j", "no luck") if desk.put_phase(Phase.RUNNING) is None else None
    assert refused.value.status == 409


def test_request_without_etcd_is_refused_and_states_if_its_outcome_is_unknown(desk: WriteQueue) -> None:
    desk.client.cut()
    with pytest.raises(Refused, match="etcd cannot be reached now, and this needs it") as refused:
        desk.actions.submit(RAW, by="x")
    assert refused.value.status == 503
    assert "not known" not in str(refused.value)
    desk.client.heal()
    desk.client.lose_answers = True
    with pytest.raises(Refused, match="whether it was done all the same is not known"):
        desk.actions.submit(RAW, by="x")
    assert JOB.spec in desk.server.kvs


def test_a_record_of_another_protocol_is_not_overwritten(desk: WriteQueue) -> None:
    desk.client.put(JOB.spec, b'{"protocol": 7}')
    with pytest.raises(Refused, match="speaks protocol 7") as refused:
        desk.actions.stop("j", "x")
    assert refused.value.status == 409


def test_a_drain_and_its_end(desk: WriteQueue) -> None:
    with pytest.raises(Refused, match="there is no node 'a'; there are: none"):
        desk.actions.drain("a", "x", 0.0)


def test_uncordon_readmits_an_excluded_node(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    desk.client.put(KEYS.node("a"), encode(NODE))
    failures = tuple(Failure(wall_s=1.0, generation=1, node=n, fingerprint="x") for n in "aab")
    aside = JobState(phase=Phase.RUNNING, excluded_nodes=("a", "c"), failures=failures, restarts=3)
    desk.client.put(JOB.state, encode(aside))
    desk.board.publish(Snapshot(cluster=Reader(KEYS).read(desk.server.kvs, 1)))
    desk.actions.cordon("a", "look at it")
    assert KEYS.cordon("a") in desk.server.kvs
    desk.actions.uncordon("a")
    assert KEYS.cordon("a") not in desk.server.kvs
    assert (desk.state().excluded_nodes, [f.node for f in desk.state().failures], desk.state().restarts) == (
        ("c",),
        ["b"],
        3,
    )


# ── the writer ──────────────────────────────────────────────────────────────────────────────────────────────


def test_node_registration_is_leased_and_lease_loss_is_reported(desk: WriteQueue) -> None:
    desk.writer.register(NODE, 5.0, 1.5)
    desk.writer.register(NODE, 5.0, 1.5)  # the same is under way
    registered, done = desk.written()
    assert isinstance(registered, Registered)
    assert done == Written("register")
    assert desk.server.kvs[KEYS.node("a")].lease == registered.lease.id
    desk.client.cut()
    desk.server.advance(20.0)
    events, _ = desk.mailbox.take(0)
    assert [type(e) for e in events] == [LeaseLost]
    assert KEYS.node("a") not in desk.server.kvs


def test_a_node_takes_over_its_own_name_but_not_anothers(desk: WriteQueue) -> None:
    desk.client.put(KEYS.node("a"), encode(NODE))
    desk.writer.register(NODE, 5.0, 1.5)
    assert isinstance(desk.written()[0], Registered)
    other = NodeRecord(
        node="a", hostname="other", address="x", slots=1, gpus=0, version="1", pid=2, started_wall_s=1.0
    )  # fmt: skip
    desk.writer.register(other, 5.0, 1.5)
    (done,) = desk.written()
    assert isinstance(done, Written)
    assert "another host (h, 10.0.0.1) is already called 'a'" in done.error
    assert decode(NodeRecord, desk.server.kvs[KEYS.node("a")].value) == NODE


def test_a_failed_write_is_reported_and_may_be_asked_for_again(desk: WriteQueue) -> None:
    desk.client.cut()
    desk.writer.register(NODE, 5.0, 1.5)
    (done,) = desk.written()
    assert isinstance(done, Written)
    assert done.error.startswith("EtcdUnavailable")
    desk.client.heal()
    desk.writer.register(NODE, 5.0, 1.5)
    assert isinstance(desk.written()[0], Registered)


def test_an_update_under_a_lease_that_is_gone_is_a_lost_lease(desk: WriteQueue) -> None:
    desk.writer.update(NODE, 12345)
    assert isinstance(desk.written()[0], LeaseLost)


def test_a_state_is_not_written_over_a_newer_one(desk: WriteQueue) -> None:
    desk.actions.submit(RAW, by="x")
    seen = desk.job()
    desk.put_phase(Phase.RUNNING)
    desk.writer.put_state(seen, JobState(phase=Phase.FAILED))
    assert desk.written() == [Written("state j")]
    assert desk.state().phase is Phase.RUNNING
    desk.writer.put_state(desk.job(), JobState(phase=Phase.STOPPED))
    desk.written()
    assert desk.state().phase is Phase.STOPPED


def test_an_etcd_that_loses_data_stops_the_daemon_where_that_matters(desk: WriteQueue) -> None:
    desk.writer.check_version(refuse=False)
    assert desk.written() == [Written("version")]
    desk.writer.check_version(refuse=True)
    stop = desk.written()[0]
    assert isinstance(stop, Stop)
    assert stop.code == 78
    assert "etcd 3.5.1 can lose data" in stop.why
    assert "etcd.allow_unsound_version = true" in stop.why


def test_members_are_read_with_their_age(desk: WriteQueue) -> None:
    member = MemberRecord(node="a", incarnation="i", host="h", port=1, slots=2)
    desk.actions.submit(RAW, by="x")
    desk.client.put(JOB.member("a"), encode(member))
    assert desk.job().members["a"].create_revision == desk.server.kvs[JOB.member("a")].create_revision
