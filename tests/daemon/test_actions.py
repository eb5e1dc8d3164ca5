"""What people ask for, and what the daemon writes of itself, on an etcd in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import structlog
from support.fake_etcd import FakeClient, FakeServer

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import Failure, JobState, MemberRecord, Phase, SpecRecord, decode, encode
from elastic.contract.records.node_records import AskedRecord, NodeRecord
from elastic.etcd.client import Etcd, EtcdUnavailable, TxnResult
from elasticd.access.authority import Authority, Peer
from elasticd.api import actions
from elasticd.api.actions import Actions
from elasticd.base.errors import Refused
from elasticd.base.settings import PerUserSettings
from elasticd.cluster.cluster import Cluster, ClusterReader, Job
from elasticd.cluster.published_state import PublishedState, Snapshot
from elasticd.cluster.quotas import Quotas
from elasticd.cluster.reconcile import job_state
from elasticd.node.event_queue import Event, EventQueue, NodeLeaseLost, NodeRegistered, Stop, Written
from elasticd.node.writer import ClusterWriter

KEYS = ClusterKeys("main")
JOB = KEYS.job("j")
ADA = Peer(1000, 1000, "ada", pid=77)
ADMIN = Peer(999, 999, "elasticd")
RAW = {"name": "j", "script": "/t.py"}
NODE = NodeRecord(
    node="a", hostname="h", address="10.0.0.1", slots=2, gpus=0, version="1", pid=1, started_wall_s=0.0
)  # fmt: skip


class WriteQueue:
    """Actions and a writer on one fake etcd; the published is never behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(actions, "SEEN_S", 0.0)
        self.server = FakeServer()
        self.client = FakeClient(self.server)
        etcd = cast(Etcd, self.client)
        self.published = PublishedState()
        authority = Authority(daemon_uid=999)
        self.actions = Actions(etcd, KEYS, self.published, authority, lambda record: "", PerUserSettings())
        self.event_queue = EventQueue()
        self.writer = ClusterWriter(etcd, KEYS, self.event_queue, structlog.get_logger())

    def state(self) -> JobState:
        return decode(JobState, self.server.kvs[JOB.state].value)

    def spec(self) -> SpecRecord:
        return decode(SpecRecord, self.server.kvs[JOB.spec].value)

    def put_phase(self, phase: Phase) -> None:
        self.client.put(JOB.state, encode(JobState(phase=phase)))

    def job(self) -> Job:
        return ClusterReader(KEYS).read(self.server.kvs, 1).jobs["j"]

    def written(self) -> list[Event]:
        """Do the writer's next piece of work; what the loop hears of it."""
        self.writer.run_one()
        events, _ = self.event_queue.take(0)
        for event in events:
            if isinstance(event, Written):
                self.writer.written(event)
        return events


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> WriteQueue:
    return WriteQueue(monkeypatch)


def test_a_sample_is_taken_over_from_an_earlier_request_that_is_still_ahead(writes: WriteQueue) -> None:
    """Else the second request would replace the first one in the agents' orders, which would wait in vain."""
    writes.actions.submit(RAW, ADA, ADA)
    sample = lambda step, next_step: writes.actions.sample("j", step, ADA, next_step=next_step)  # noqa: E731
    assert sample(40, 11) == 40
    assert sample(46, 17) == 40
    assert writes.job().asked.sample_step == 40
    assert sample(70, 41) == 70, "the job has passed it"
    assert sample(30, 5) == 30, "the job has gone back"
    assert writes.job().asked.sample_step == 30


def test_submit_writes_spec_and_state_at_once(writes: WriteQueue) -> None:
    assert writes.actions.submit(RAW, ADA, ADA) == "j"
    assert (writes.spec().submitted_by, writes.state().phase) == ("ada", Phase.PENDING)
    spec, state = writes.server.kvs[JOB.spec], writes.server.kvs[JOB.state]
    assert spec.create_revision == state.create_revision, "one transaction"


def test_a_new_job_gets_no_record_that_an_agent_of_an_earlier_one_has_left(writes: WriteQueue) -> None:
    """One that still ended when its job was forgotten writes its incidents and its ranks' time; one that missed that
    its job was over takes etcd for wiped, and writes its generation."""
    reports = (JOB.broken(3), JOB.incident(4), JOB.ranks_of("a"), JOB.progress)
    for key in (JOB.generation, JOB.restored, JOB.member("a"), *reports):
        writes.client.put(key, b"{}")
    writes.actions.submit(RAW, ADA, ADA)
    assert sorted(writes.server.kvs) == [JOB.spec, JOB.state]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"name": "j"}, "give exactly one of them"),
        (RAW | {"nodez": 1}, "did you mean 'nodes'"),
        (RAW | {"worker": 2}, "did you mean 'workers_per_node'"),
        (RAW | {"steps": 2}, "did you mean 'fingerprint_every_steps'"),
        (RAW | {"script": "t.py"}, "an absolute path is needed here"),
        (RAW | {"workdir": "w"}, "workdir = 'w': an absolute path"),
        (RAW | {"name": "a/b"}, "name = 'a/b': use 1 to 63"),
    ],
)
def test_a_wrong_job_is_refused(writes: WriteQueue, raw: dict[str, object], words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        writes.actions.submit(raw, ADA, ADA)
    assert refused.value.status == 400
    assert not writes.server.kvs


def test_a_name_is_taken_until_its_job_is_over_and_then_only_on_purpose(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    with pytest.raises(Refused, match="is there already and pending: stop it first"):
        writes.actions.submit(RAW, ADA, ADA, replace=True)
    writes.put_phase(Phase.SUCCEEDED)
    writes.client.put(JOB.incident(1), b"old")
    with pytest.raises(Refused, match="has succeeded: choose another name, remove its records"):
        writes.actions.submit(RAW, ADA, ADA)
    writes.actions.submit(RAW, ADA, ADA, replace=True)
    assert (writes.spec().submitted_by, writes.state().phase) == ("ada", Phase.PENDING)
    assert JOB.incident(1) not in writes.server.kvs


def test_stop_is_a_state_that_agents_see(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    writes.actions.stop("j", "enough", ADA)
    assert (writes.state().phase, writes.state().reason) == (Phase.STOPPING, "enough")
    writes.actions.stop("j", "again", ADA)
    assert writes.state().reason == "enough"
    writes.put_phase(Phase.FAILED)
    writes.actions.stop("j", "too late", ADA)
    assert writes.state().phase is Phase.FAILED


def test_scale_keeps_the_jobs_age(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    age = writes.server.kvs[JOB.spec].create_revision
    writes.actions.scale("j", "2:4", ADA)
    assert (writes.spec().spec.nodes, writes.server.kvs[JOB.spec].create_revision) == ("2:4", age)
    with pytest.raises(Refused, match="nodes = '4:2'"):
        writes.actions.scale("j", "4:2", ADA)


def test_requests_for_a_checkpoint_are_counted(writes: WriteQueue) -> None:
    writes.actions.submit(RAW | {"checkpoint": {"dir": "/c"}}, ADA, ADA)
    for _ in range(3):
        writes.actions.checkpoint("j", ADA)
    assert decode(AskedRecord, writes.server.kvs[JOB.asked].value).checkpoint == 3


def test_a_job_without_a_folder_for_checkpoints_is_not_asked_for_one(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    with pytest.raises(Refused, match=r"job 'j' writes no checkpoints: its checkpoint\.dir is empty") as refused:
        writes.actions.checkpoint("j", ADA)
    assert refused.value.status == 409
    assert JOB.asked not in writes.server.kvs


def test_only_a_job_that_is_over_is_forgotten(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    with pytest.raises(Refused, match="is not over"):
        writes.actions.forget("j", ADA)
    writes.put_phase(Phase.STOPPED)
    writes.actions.forget("j", ADA)
    assert list(writes.server.kvs) == [KEYS.ended(JOB.spec)]
    with pytest.raises(Refused, match="there is no job 'j'") as refused:
        writes.actions.forget("j", ADA)
    assert refused.value.status == 404


def test_job_state_update_keeps_concurrent_changes(writes: WriteQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    writes.actions.submit(RAW | {"checkpoint": {"dir": "/c"}}, ADA, ADA)
    get, rivals = writes.client.get, 2

    def rival(key: str) -> object:
        nonlocal rivals
        found = get(key)
        if key in (JOB.state, JOB.asked) and rivals:
            rivals -= 1
            other = JobState(phase=Phase.RUNNING, restarts=7) if key == JOB.state else AskedRecord()
            writes.client.put(key, encode(other))
        return found

    monkeypatch.setattr(writes.client, "get", rival)
    writes.actions.stop("j", "enough", ADA)
    assert (writes.state().phase, writes.state().restarts) == (Phase.STOPPING, 7)
    rivals = 99
    with pytest.raises(Refused, match="all the time") as refused:
        writes.actions.checkpoint("j", ADA) if writes.put_phase(Phase.RUNNING) is None else None
    assert refused.value.status == 409


@pytest.mark.parametrize("written", [encode(JobState(phase=Phase.RUNNING)), b'{"protocol":99}', b"[1]", None])
@pytest.mark.parametrize("deleted_at_once", [True, False])
def test_a_job_stops_whatever_its_user_writes_over_its_state(
    writes: WriteQueue, written: bytes | None, deleted_at_once: bool
) -> None:
    """The job's user has the key that signs it, and may write all the time."""

    def write(key: str) -> object:
        found = get(key)
        if key == JOB.state:
            writes.client.delete(key) if written is None else writes.client.put(key, written)
        return found

    get = writes.client.get
    writes.actions.submit(RAW, ADA, ADA)
    writes.client.get = write  # type: ignore[method-assign,assignment]
    writes.client.get(JOB.state)
    writes.actions.stop("j", "enough", ADMIN)
    writes.client.get(JOB.state)
    reader = ClusterReader(KEYS, writes.published.told_to_stop if deleted_at_once else None)
    if not deleted_at_once:
        reader.read(writes.server.kvs, 1, signed=True)
    writes.client.delete(JOB.asked)
    job = reader.read(writes.server.kvs, 2, signed=True).jobs["j"]
    assert (job.spec is not None, job.state.phase, job.state.reason) == (True, Phase.STOPPING, "enough")
    state = job_state(job, Cluster(), "a", True, "", 5.0)
    assert state is not None
    assert (state.phase, state.since_wall_s) == (Phase.STOPPING, 5.0), "its agents are to see it"
    state = job_state(job, Cluster(), "a", False, "", 5.0)
    assert (state and state.phase) is Phase.STOPPED
    writes.client.get = get  # type: ignore[method-assign]
    writes.put_phase(Phase.STOPPED)
    writes.actions.restart("j", ADA)
    assert reader.read(writes.server.kvs, 3).jobs["j"].state.phase is Phase.PENDING


def test_request_without_etcd_is_refused_and_states_if_its_outcome_is_unknown(
    writes: WriteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes.client.cut()
    with pytest.raises(Refused, match="etcd cannot be reached now, and this needs it") as refused:
        writes.actions.submit(RAW, ADA, ADA)
    assert refused.value.status == 503
    assert "not known" not in str(refused.value)
    writes.client.heal()
    writes.client.lose_answers = True
    monkeypatch.setattr(writes.client, "get", writes.server.kvs.get)  # the write alone is not answered
    with pytest.raises(Refused, match="whether it was done all the same is not known"):
        writes.actions.submit(RAW, ADA, ADA)
    assert JOB.spec in writes.server.kvs


def test_a_record_of_another_protocol_is_not_overwritten(writes: WriteQueue) -> None:
    writes.client.put(JOB.spec, b'{"protocol": 99}')
    with pytest.raises(Refused, match="speaks protocol 99") as refused:
        writes.actions.stop("j", "x", ADA)
    assert refused.value.status == 409


def test_before_etcd_is_read_nothing_is_said_to_be_missing(writes: WriteQueue) -> None:
    with pytest.raises(
        Refused, match="whether node 'a' is there is not known: elasticd has not reached etcd"
    ) as refused:
        writes.actions.drain("a", "x", 0.0)
    assert refused.value.status == 503


def test_a_drain_and_its_end(writes: WriteQueue) -> None:
    writes.published.publish(Snapshot(cluster=Cluster(revision=1)))
    with pytest.raises(Refused, match="there is no node 'a'; there are: none"):
        writes.actions.drain("a", "x", 0.0)


def test_restart_submits_a_finished_job_again_and_keeps_nothing_but_its_description(writes: WriteQueue) -> None:
    writes.actions.submit(RAW | {"args": ["-x"]}, ADA, ADA)
    with pytest.raises(Refused, match="not over"):
        writes.actions.restart("j", ADMIN)
    writes.put_phase(Phase.FAILED)
    alone = JOB.generation, JOB.restored, JOB.progress, JOB.asked
    for key in (*alone, JOB.member("a"), JOB.ranks_of("a"), JOB.broken(1), JOB.incident(1)):
        writes.client.put(key, b"{}")
    writes.actions.restart("j", ADMIN)
    assert set(writes.server.kvs) == {JOB.spec, JOB.state}
    assert (writes.spec().uid, writes.spec().user) == (1000, "ada"), "an admin's restart does not change the owner"
    assert (writes.spec().spec.args, writes.spec().submitted_by, writes.state().phase) == (
        ("-x",),
        "elasticd",
        Phase.PENDING,
    )


def test_restart_loses_no_description_if_etcd_fails_on_the_way(
    writes: WriteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    writes.put_phase(Phase.STOPPED)

    def fails(compares: object, then: object) -> TxnResult:
        raise EtcdUnavailable("gone")

    monkeypatch.setattr(writes.client, "txn", fails)
    with pytest.raises(Refused, match="etcd cannot be reached"):
        writes.actions.restart("j", ADMIN)
    assert (writes.spec().submitted_by, writes.state().phase) == ("ada", Phase.STOPPED)


@pytest.mark.parametrize(
    "act",
    [
        lambda a: a.restart("j", ADA),
        lambda a: a.forget("j", ADA),
        lambda a: a.submit(RAW, ADA, ADA, replace=True),
    ],
    ids=["restart", "forget", "replace"],
)
def test_a_job_that_another_request_has_started_anew_meanwhile_keeps_its_records(
    writes: WriteQueue, monkeypatch: pytest.MonkeyPatch, act: Callable[[Actions], object]
) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    writes.put_phase(Phase.STOPPED)
    anew = {JOB.state: encode(JobState(phase=Phase.RUNNING)), JOB.generation: b"g", JOB.member("a"): b"m"}
    read = writes.actions._read

    def overtaken(kind: type[Any], key: str) -> tuple[Any, int]:
        found = read(kind, key)
        if key == JOB.state and found[0].phase.over:
            for each, value in anew.items():
                writes.client.put(each, value)
        return found

    monkeypatch.setattr(writes.actions, "_read", overtaken)
    with pytest.raises(Refused, match="is being changed by another request too"):
        act(writes.actions)
    assert {key: kv.value for key, kv in writes.server.kvs.items() if key != JOB.spec} == anew


def test_uncordon_readmits_an_excluded_node(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    writes.client.put(KEYS.node("a"), encode(NODE))
    failures = tuple(Failure(wall_s=1.0, generation=1, node=n, fingerprint="x") for n in "aab")
    no_agent = {"a": "no torch", "c": "no python"}
    aside = JobState(phase=Phase.RUNNING, excluded_nodes=("a", "c"), no_agent=no_agent, failures=failures, restarts=3)
    writes.client.put(JOB.state, encode(aside))
    writes.published.publish(Snapshot(cluster=ClusterReader(KEYS).read(writes.server.kvs, 1)))
    writes.actions.cordon("a", "look at it")
    assert KEYS.cordon("a") in writes.server.kvs
    writes.actions.uncordon("a")
    assert KEYS.cordon("a") not in writes.server.kvs
    assert (writes.state().excluded_nodes, [f.node for f in writes.state().failures], writes.state().restarts) == (
        ("c",),
        ["b"],
        3,
    )
    assert writes.state().no_agent == {"c": "no python"}


# ── the writer ──────────────────────────────────────────────────────────────────────────────────────────────


def test_node_registration_is_leased_and_lease_loss_is_reported(writes: WriteQueue) -> None:
    writes.writer.register(NODE, 5.0, 1.5)
    writes.writer.register(NODE, 5.0, 1.5)  # the same is under way
    registered, done = writes.written()
    assert isinstance(registered, NodeRegistered)
    assert done == Written("register")
    assert writes.server.kvs[KEYS.node("a")].lease == registered.lease.id
    writes.client.cut()
    writes.server.advance(20.0)
    events, _ = writes.event_queue.take(0)
    assert [type(e) for e in events] == [NodeLeaseLost]
    assert KEYS.node("a") not in writes.server.kvs


def test_a_node_takes_over_its_own_name_but_not_anothers(writes: WriteQueue) -> None:
    writes.client.put(KEYS.node("a"), encode(NODE))
    writes.writer.register(NODE, 5.0, 1.5)
    assert isinstance(writes.written()[0], NodeRegistered)
    other = NodeRecord(
        node="a", hostname="other", address="x", slots=1, gpus=0, version="1", pid=2, started_wall_s=1.0
    )  # fmt: skip
    writes.writer.register(other, 5.0, 1.5)
    (done,) = writes.written()
    assert isinstance(done, Written)
    assert "another host (h, 10.0.0.1) is already called 'a'" in done.error
    assert decode(NodeRecord, writes.server.kvs[KEYS.node("a")].value) == NODE


def test_a_failed_write_is_reported_and_may_be_asked_for_again(writes: WriteQueue) -> None:
    writes.client.cut()
    writes.writer.register(NODE, 5.0, 1.5)
    (done,) = writes.written()
    assert isinstance(done, Written)
    assert done.error.startswith("EtcdUnavailable")
    writes.client.heal()
    writes.writer.register(NODE, 5.0, 1.5)
    assert isinstance(writes.written()[0], NodeRegistered)


def test_an_update_under_a_lease_that_is_gone_is_a_lost_lease(writes: WriteQueue) -> None:
    writes.writer.update(NODE, 12345)
    assert isinstance(writes.written()[0], NodeLeaseLost)


def test_a_state_is_not_written_over_a_newer_one(writes: WriteQueue) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    seen = writes.job()
    writes.put_phase(Phase.RUNNING)
    writes.writer.put_state(seen, JobState(phase=Phase.FAILED))
    assert writes.written() == [Written("state j")]
    assert writes.state().phase is Phase.RUNNING
    writes.writer.put_state(writes.job(), JobState(phase=Phase.STOPPED))
    writes.written()
    assert writes.state().phase is Phase.STOPPED


def test_an_etcd_that_loses_data_stops_the_daemon_where_that_matters(writes: WriteQueue) -> None:
    writes.writer.check_version(refuse=False)
    assert writes.written() == [Written("version")]
    writes.writer.check_version(refuse=True)
    stop = writes.written()[0]
    assert isinstance(stop, Stop)
    assert stop.code == 78
    assert "etcd.allow_unsound_version = true" in stop.why


def test_members_are_read_with_their_age(writes: WriteQueue) -> None:
    member = MemberRecord(node="a", incarnation="i", host="h", port=1, slots=2)
    writes.actions.submit(RAW, ADA, ADA)
    writes.client.put(JOB.member("a"), encode(member))
    assert writes.job().members["a"].create_revision == writes.server.kvs[JOB.member("a")].create_revision


BOB = Peer(1001, 1001, "bob")


@pytest.mark.parametrize(
    "act",
    [
        lambda a: a.stop("j", "x", BOB),
        lambda a: a.scale("j", "2:4", BOB),
        lambda a: a.checkpoint("j", BOB),
        lambda a: a.forget("j", BOB),
        lambda a: a.restart("j", BOB),
        lambda a: a.submit(RAW, BOB, BOB, replace=True),
    ],
    ids=["stop", "scale", "checkpoint", "forget", "restart", "replace"],
)
def test_another_users_job_cannot_be_changed(writes: WriteQueue, act: Callable[[Actions], object]) -> None:
    writes.actions.submit(RAW, ADA, ADA)
    writes.put_phase(Phase.STOPPED)
    before = dict(writes.server.kvs)
    with pytest.raises(Refused, match=r"belongs to ada; ada, elasticd's own user \(uid 999\) or root can") as refused:
        act(writes.actions)
    assert refused.value.status == 403
    assert writes.server.kvs == before


@pytest.mark.parametrize(
    ("act", "phase"),
    [
        (lambda a: a.stop("j", "x", ADA), Phase.RUNNING),
        (lambda a: a.scale("j", "2:4", ADA), Phase.RUNNING),
        (lambda a: a.checkpoint("j", ADA), Phase.RUNNING),
        (lambda a: a.sample("j", 9, ADA, next_step=5), Phase.RUNNING),
        (lambda a: a.forget("j", ADA), Phase.STOPPED),
        (lambda a: a.restart("j", ADA), Phase.STOPPED),
        (lambda a: a.submit(RAW, ADA, ADA, replace=True), Phase.STOPPED),
    ],
    ids=["stop", "scale", "checkpoint", "sample", "forget", "restart", "replace"],
)
def test_a_request_does_nothing_to_another_users_job_that_takes_the_name_meanwhile(
    writes: WriteQueue, monkeypatch: pytest.MonkeyPatch, act: Callable[[Actions], object], phase: Phase
) -> None:
    """Between the check of the owner and the write: ada's job is forgotten, and bob submits his."""
    raw = RAW | {"checkpoint": {"dir": "/c"}}
    writes.actions.submit(raw, ADA, ADA)
    writes.put_phase(phase)
    get, before = writes.client.get, dict(writes.server.kvs)

    def overtaken(key: str) -> object:
        found = get(key)
        if key == JOB.spec and dict(writes.server.kvs) == before:
            monkeypatch.setattr(writes.client, "get", get)
            writes.client.put(JOB.state, encode(JobState(phase=Phase.STOPPED)))
            writes.actions.submit(raw, ADMIN, BOB, replace=True)
            writes.put_phase(phase)
            taken.update(writes.server.kvs)
        return found

    taken: dict[str, object] = {}
    monkeypatch.setattr(writes.client, "get", overtaken)
    with pytest.raises(Refused, match=r"belongs to bob|is being changed by another request"):
        act(writes.actions)
    assert writes.server.kvs == taken


def test_submission_of_a_job_that_this_node_would_refuse_writes_nothing(
    writes: WriteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes.actions, "refusal", lambda record: f"no user {record.user} {record.uid}")
    with pytest.raises(Refused, match="cannot be submitted here: no user ada 1000") as refused:
        writes.actions.submit(RAW, ADMIN, ADA)
    assert refused.value.status == 403
    assert not writes.server.kvs


def test_a_description_beyond_the_limits_is_refused_at_submission_but_for_admins(writes: WriteQueue) -> None:
    with pytest.raises(Refused, match=r"args has .* 65536 is the most"):
        writes.actions.submit(RAW | {"args": ["x" * 70_000]}, ADMIN, ADMIN)
    writes.actions._quotas = Quotas(PerUserSettings(jobs=2))
    writes.actions.submit(RAW, ADA, ADA)
    writes.actions.scale("j", "1:3", ADA)
    more = RAW | {"name": "more"}
    for refused in (lambda: writes.actions.submit(more, ADA, ADA), lambda: writes.actions.scale("j", "1:4", ADA)):
        with pytest.raises(Refused, match=r"ada .*per_user.jobs = 2 is the most"):
            refused()
    writes.actions.submit(more, ADMIN, ADMIN)


def test_many_jobs_are_forgotten_at_once_but_those_that_run_or_are_anothers(writes: WriteQueue) -> None:
    for name, phase in (("a", Phase.SUCCEEDED), ("b", Phase.RUNNING), ("c", Phase.FAILED)):
        writes.actions.submit(RAW | {"name": name}, ADA, ADA)
        writes.client.put(KEYS.job(name).state, encode(JobState(phase=phase)))
    assert writes.actions.forget_each(["a", "b", "none"], Peer(1001, 1001, "eve")) == []
    assert writes.actions.forget_each(["a", "b", "none", "c"], ADA) == ["a", "c"]
    assert KEYS.job("b").spec in writes.server.kvs
    assert KEYS.job("a").spec not in writes.server.kvs


def test_jobs_of_the_view_are_forgotten_in_one_transaction_unless_one_was_submitted_anew(writes: WriteQueue) -> None:
    names = [f"j{number}" for number in range(actions.AT_ONCE)]
    for name in names:
        writes.actions.submit(RAW | {"name": name}, ADA, ADA)
        writes.client.put(KEYS.job(name).state, encode(JobState(phase=Phase.SUCCEEDED)))
    writes.published.publish(Snapshot(cluster=ClusterReader(KEYS).read(writes.server.kvs, 1)))
    writes.actions.restart("j1", ADA)
    writes.actions.submit(RAW | {"name": "new"}, ADA, ADA)
    writes.client.put(KEYS.job("new").state, encode(JobState(phase=Phase.FAILED)))
    assert writes.actions.forget_each(["j0", "j1", "j0"], ADA) == ["j0"]
    before = writes.server.revision
    assert writes.actions.forget_each(names[2:], Peer(1001, 1001, "eve")) == []
    assert writes.actions.forget_each([*names[2:], "new", "none"], ADA) == [*names[2:], "new"]
    assert writes.server.revision == before + 2, "those of the view at once, and one that it does not have yet"
    assert {key for key in writes.server.kvs if key.endswith("/spec") and "/ended/" not in key} == {KEYS.job("j1").spec}
