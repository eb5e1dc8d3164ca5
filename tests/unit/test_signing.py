"""Signatures of records: valid under their own key, for their own submission, and in order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.keys import ClusterKeys
from elastic.contract.node_records import CordonRecord
from elastic.contract.records import JobState, Phase, SpecRecord, encode
from elastic.contract.spec import JobSpec
from elastic.etcd.client import KV, ClusterSigner, Delete, EtcdError, EtcdForged, JobSigner, Op, Put

KEYS = ClusterKeys("main")
A, B = KEYS.job("a"), KEYS.job("b")
SECRET = bytes(range(32))


class World:
    """etcd as a dictionary, that anyone may write to."""

    def __init__(self) -> None:
        self.revision = 0
        self.kvs: dict[str, KV] = {}
        self.now_ns = 1000

    def daemon(self, secret: bytes = SECRET) -> ClusterSigner:
        return ClusterSigner(KEYS.root, secret, lambda: self.now_ns)

    def agent(self, job: str = "a", submission: str = "first") -> JobSigner:
        return JobSigner(self.daemon().job_key(job, submission), lambda: self.now_ns)

    def write(self, key: str, value: bytes) -> KV:
        self.revision += 1
        self.kvs[key] = KV(key, value, 1, self.revision, 0)
        return self.kvs[key]

    def txn(self, signer: ClusterSigner | JobSigner, *ops: Op) -> None:
        for op in signer.sealed(ops):
            if isinstance(op, Put):
                self.write(op.key, op.value)

    def submit(self, signer: ClusterSigner, job: str = "a", submission: str = "first") -> None:
        keys = KEYS.job(job)
        self.txn(signer, Put(keys.spec, spec(job, submission)), Put(keys.state, encode(JobState())))


def spec(job: str, submission: str) -> bytes:
    return encode(
        SpecRecord(
            spec=JobSpec(name=job, script="/t.py"), submitted_wall_s=1.0, submitted_by="root", submission=submission
        )
    )


@pytest.fixture
def world() -> World:
    return World()


def refused(world: World, reader: ClusterSigner | JobSigner) -> dict[str, str]:
    return {key: refusal.why for key, refusal in reader.verified(world.kvs.values())[1].items()}


@given(st.binary(max_size=300), st.sampled_from([KEYS.node("n"), KEYS.drain("n"), A.asked]))
def test_what_a_daemon_signs_another_daemon_accepts_unchanged(value: bytes, key: str) -> None:
    world = World()
    world.txn(world.daemon(), Put(key, value, lease=7))
    found, wrong = world.daemon().verified(world.kvs.values())
    assert (found[key].value, wrong) == (value, {})


def test_an_agent_reads_the_spec_and_signs_its_jobs_records(world: World) -> None:
    daemon, agent = world.daemon(), world.agent()
    world.submit(daemon)
    assert agent.opened(world.kvs[A.spec]).value == spec("a", "first")
    world.txn(agent, Put(A.state, encode(JobState(phase=Phase.RUNNING))), Delete(A.progress))
    assert refused(world, daemon) == refused(world, world.agent()) == {}


@pytest.mark.parametrize(
    "key", [A.spec, A.state, A.generation, A.member("n"), KEYS.drain("n"), KEYS.node("n"), A.asked]
)
def test_records_without_a_signature_are_refused(world: World, key: str) -> None:
    world.write(key, b'{"protocol":5}')
    assert refused(world, world.daemon()) == {key: "it is not signed"}


@given(st.data())
def test_any_changed_byte_is_refused(data: st.DataObject) -> None:
    world = World()
    world.submit(world.daemon())
    raw = bytearray(world.kvs[A.state].value)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    world.write(A.state, bytes(raw))
    assert A.state in refused(world, world.daemon())


def test_a_record_is_valid_under_its_own_key_only(world: World) -> None:
    daemon = world.daemon()
    world.submit(daemon, "a", "one")
    world.submit(daemon, "b", "two")
    world.txn(daemon, Put(KEYS.cordon("n"), encode(CordonRecord(reason="r", since_wall_s=1))))
    world.txn(world.agent("a", "one"), Put(A.member("n"), b"{}"))
    moved = [
        (A.spec, B.spec),
        (A.state, B.state),
        (KEYS.cordon("n"), KEYS.drain("n")),
        (KEYS.cordon("n"), KEYS.cordon("m")),
        (A.member("n"), A.member("m")),
    ]
    for source, target in moved:
        world.write(target, world.kvs[source].value)
    assert refused(world, world.daemon()).keys() == {target for _, target in moved}


def test_a_record_of_an_earlier_job_of_the_same_name_is_refused(world: World) -> None:
    daemon = world.daemon()
    world.submit(daemon, "a", "one")
    old = world.kvs[A.state].value
    world.submit(daemon, "a", "two")
    world.write(A.state, old)
    assert refused(world, world.daemon()) == {A.state: "it belongs to an earlier job of this name"}
    assert A.state in refused(world, world.agent("a", "two"))


def test_an_older_record_that_is_written_again_is_refused_by_who_saw_the_newer(world: World) -> None:
    daemon = world.daemon()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    running, old_spec = world.kvs[A.state].value, world.kvs[A.spec].value
    world.now_ns = 1  # the clock of the next writer is behind
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.STOPPED))))
    daemon.verified(world.kvs.values())
    world.write(A.state, running)
    assert refused(world, daemon) == {A.state: "it is an older record that was written again"}
    world.submit(daemon, "a", "later")
    daemon.verified(world.kvs.values())
    world.write(A.spec, old_spec)
    assert A.spec in refused(world, daemon), "else its earlier records would be valid again"
    assert A.spec not in refused(world, world.daemon()), "documented: it has not seen the newer one"


def test_a_restored_backup_of_etcd_is_accepted(world: World) -> None:
    daemon = world.daemon()
    world.submit(daemon)
    backup = dict(world.kvs)
    world.now_ns += 1
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.RUNNING))))
    daemon.verified(world.kvs.values())
    assert daemon.verified(backup.values())[1] == {}


def test_an_agent_signs_nothing_but_its_own_jobs_records(world: World) -> None:
    agent = world.agent()
    for key in (A.spec, A.asked, B.state, KEYS.drain("n"), KEYS.node("n")):
        with pytest.raises(EtcdError, match="cannot sign"):
            agent.sealed([Put(key, b"{}")])


@pytest.mark.parametrize("key", [A.spec, A.asked, B.spec, B.state, KEYS.drain("n"), KEYS.node("n")])
def test_a_job_key_is_good_for_no_other_record(world: World, key: str) -> None:
    """The user of a job has its key, and may write to etcd what they like."""
    secret = world.daemon().job_key("a", "first")
    of_b = msgspec.structs.replace(secret, job="b")
    for thief in (ClusterSigner(KEYS.root, bytes.fromhex(secret.secret)), JobSigner(secret), JobSigner(of_b)):
        thief.key_id = secret.key_id
        try:
            world.txn(thief, Put(key, spec(KEYS.authority(key)[1] or "a", "first")))
        except EtcdError:
            continue
        assert key in refused(world, world.daemon())


def test_agents_write_back_the_spec_that_a_daemon_signed(world: World) -> None:
    world.submit(world.daemon())
    agent = world.agent()
    agent.opened(world.kvs[A.spec])
    world.kvs.clear()
    world.txn(agent, Put(A.state, encode(JobState())), Put(A.spec, b"as the agent knows it"))
    found, wrong = world.daemon().verified(world.kvs.values())
    assert (found[A.spec].value, wrong) == (spec("a", "first"), {})


def test_another_cluster_key_is_named(world: World) -> None:
    world.submit(world.daemon(bytes(32)))
    assert "another cluster key" in refused(world, world.daemon())[A.spec]
    with pytest.raises(EtcdForged, match="another cluster key"):
        world.agent().opened(world.kvs[A.spec])


def test_keys_of_others_are_left_as_they_are(world: World) -> None:
    world.txn(world.daemon(), Put("/elsewhere", b"x"))
    assert world.daemon().opened(world.kvs["/elsewhere"]).value == b"x"
