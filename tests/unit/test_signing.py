"""Signatures of records: valid under their own key, for their own submission, and in order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import KINDS, ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, SpecRecord, encode
from elastic.contract.records.node_records import CordonRecord
from elastic.etcd import stamps
from elastic.etcd.client import KV, ClusterSigner, Delete, EtcdError, EtcdForged, JobSigner, Op, Put
from elastic.etcd.signing import AHEAD_NS, ending

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

    def write(self, key: str, value: bytes, lease: int | None = None) -> KV:
        """`lease`: as an honest writer has it, if it is not given."""
        self.revision += 1
        leased = KEYS.is_leased(key) if lease is None else lease
        self.kvs[key] = KV(key, value, 1, self.revision, int(leased))
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


def test_a_clock_that_is_behind_signs_newer_records_all_the_same(world: World) -> None:
    daemon = world.daemon()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    world.now_ns = 1
    late = world.daemon()
    late.verified(world.kvs.values())
    world.txn(late, Put(A.state, encode(JobState(phase=Phase.STOPPED))))
    assert refused(world, daemon) == {}


def again(signer: ClusterSigner, world: World) -> ClusterSigner:
    """The signer of a daemon that starts after another, with what that one has saved."""
    later = world.daemon()
    later.stamps.load(signer.stamps.entries())
    return later


OLDER = "it is an older record that was written again"
PATHS = sorted(path for path, kind in KINDS.items() if kind.ordered)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_no_kind_of_record_has_an_effect_once_a_newer_one_was_read(world: World, path: str, restarted: bool) -> None:
    """Put back with or without a lease, also into an etcd that has lost its data."""
    daemon, key = world.daemon(), KEYS.root + path.replace("jobs/*", "jobs/a").replace("*", "drains/n")
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    value = spec("a", "first") if key == A.spec else b"{}"
    older = world.write(key, sealed(daemon, key, value)).value
    daemon.verified(world.kvs.values())
    world.write(key, sealed(daemon, key, value))
    assert daemon.verified(world.kvs.values())[1] == {}
    daemon = again(daemon, world) if restarted else daemon
    for lease in (0, 7):
        world.write(key, older, lease)
        assert key in refused(world, daemon)
    world.revision = 0
    world.write(key, older)
    assert key in refused(world, daemon)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("key", [KEYS.node("n"), A.member("n")])
def test_the_record_of_a_process_that_has_ended_is_not_taken_again(world: World, key: str, restarted: bool) -> None:
    daemon = world.daemon()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    last = world.write(key, sealed(daemon, key, b"{}")).value
    daemon.verified(world.kvs.values())
    del world.kvs[key]
    daemon.deleted([key])
    daemon = again(daemon, world) if restarted else daemon
    world.write(key, last, lease=9)
    assert "has ended" in refused(world, daemon)[key]
    world.write(key, sealed(daemon, key, b"{}"))
    assert refused(world, daemon) == {}, "a new process writes a new record"
    world.write(key, world.kvs[key].value, lease=0)
    assert "has no lease" in refused(world, daemon)[key]


def test_what_went_while_the_daemon_was_away_is_not_taken_again(world: World) -> None:
    daemon = world.daemon()
    last = world.write(KEYS.node("n"), sealed(daemon, KEYS.node("n"), b"{}")).value
    daemon.verified(world.kvs.values())
    later = again(daemon, world)
    later.stamps.only(set())
    world.write(KEYS.node("n"), last)
    assert KEYS.node("n") in refused(world, later)


def sealed(signer: ClusterSigner, key: str, value: bytes) -> bytes:
    (put,) = signer.sealed([Put(key, value)])
    assert isinstance(put, Put)
    return put.value


@pytest.mark.parametrize("saw_it_end", [True, False])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_that_was_forgotten_runs_by_a_new_submission_only(
    world: World, restarted: bool, saw_it_end: bool
) -> None:
    daemon, other = world.daemon(), world.daemon()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    old = dict(world.kvs)
    world.txn(daemon, *ending(KEYS, A.spec))
    ended = KEYS.ended(A.spec)
    world.kvs = {ended: world.kvs[ended]}
    reader = daemon if saw_it_end else other
    assert refused(world, reader) == {}
    reader = again(reader, world) if restarted else reader
    for key, kv in old.items():
        world.write(key, kv.value)
    assert refused(world, reader).keys() == {A.spec, A.state}
    del world.kvs[ended]
    assert refused(world, reader).keys() == {A.spec, A.state}, "also when the record of its end is deleted"
    world.now_ns = 1
    world.submit(reader, "a", "second")
    assert refused(world, reader) == {}


@pytest.mark.parametrize("key", [KEYS.cordon("n"), KEYS.drain("n"), KEYS.known_node("n")])
def test_what_was_lifted_is_not_put_back(world: World, key: str) -> None:
    daemon = world.daemon()
    old = world.write(key, sealed(daemon, key, b"{}")).value
    world.txn(daemon, *ending(KEYS, key))
    world.write(key, old)
    found, wrong = world.daemon().verified(world.kvs.values())
    assert (key in found, wrong[key].in_place_of_newer) == (False, True)


@pytest.mark.parametrize("key", [A.spec, KEYS.drain("n")])
def test_what_a_fast_clock_has_signed_is_ended_by_a_daemon_with_a_slow_one(world: World, key: str) -> None:
    world.now_ns, fast, slow = 5000, world.daemon(), ClusterSigner(KEYS.root, SECRET, lambda: 1000)
    old = world.write(key, sealed(fast, key, spec("a", "first") if key == A.spec else b"{}")).value
    slow.verified(world.kvs.values())
    world.txn(slow, *ending(KEYS, key))
    world.write(key, old)
    for reader in (fast, slow, world.daemon()):
        assert refused(world, reader).keys() == {key}


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_node_installed_anew_with_its_clock_behind_is_believed(world: World, forgotten: bool) -> None:
    """Its record before is gone from etcd, and others remember it; a daemon whose clock is slow has noted its loss."""
    node, known = KEYS.node("n"), KEYS.known_node("n")
    other, slow = world.daemon(), ClusterSigner(KEYS.root, SECRET, lambda: 500)
    world.txn(world.daemon(), Put(node, b"{}"))
    assert not refused(world, other) | refused(world, slow)
    del world.kvs[node]
    world.txn(slow, Put(known, b"{}"))
    if forgotten:
        slow.verified(world.kvs.values())
        world.txn(slow, *ending(KEYS, known))
        del world.kvs[known]
    anew = ClusterSigner(KEYS.root, SECRET, lambda: 10)
    assert not refused(world, anew) | refused(world, other)
    world.txn(anew, Put(node, b"{}"))
    assert not refused(world, other)


def test_a_jobs_user_chooses_no_stamps_of_other_records(world: World) -> None:
    """A day ahead by the fastest clock is too far by all others: they would refuse what that daemon writes."""
    daemon, agent = world.daemon(), world.agent()
    world.submit(daemon)
    agent._last = AHEAD_NS
    world.txn(agent, Put(A.state, encode(JobState())))
    assert refused(world, daemon) == {}
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.STOPPING))))
    first = world.kvs[A.state].value
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.STOPPED))), Put(KEYS.cordon("n"), b"{}"))
    world.submit(daemon, "b")
    slow = ClusterSigner(KEYS.root, SECRET, lambda: 1)
    assert refused(world, slow).keys() == {A.state}
    assert refused(world, daemon) == {}
    world.write(A.state, first)
    assert refused(world, daemon) == {A.state: OLDER}


def test_stamps_far_ahead_of_the_clock_are_refused(world: World) -> None:
    """The owner of a job signs its state with the highest stamp: no daemon could stop the job any more."""
    world.now_ns = 1_800_000_000 * 10**9
    daemon, agent = world.daemon(), world.agent()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    agent._last = 9_999_999_999_999_999_998
    agent._clock_ns = lambda: 9_999_999_999_999_999_999
    world.txn(agent, Put(A.state, encode(JobState())))
    assert "hours ahead of this node's clock" in refused(world, daemon)[A.state]
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.STOPPING))))
    assert refused(world, daemon) == refused(world, world.daemon()) == {}


def test_what_was_read_while_the_clock_was_wrong_holds_nothing_up(world: World) -> None:
    daemon, day_ns = world.daemon(), AHEAD_NS
    world.now_ns = 10 * day_ns
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    world.now_ns = day_ns
    world.submit(daemon, submission="second")
    assert refused(world, daemon) == refused(world, world.daemon()) == {}


def test_a_restored_backup_of_etcd_counts_for_agents_and_is_written_over_by_daemons(world: World) -> None:
    daemon, agent = world.daemon(), world.agent()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    backup = dict(world.kvs)
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.RUNNING))))
    for reader in (daemon, agent):
        assert reader.verified(world.kvs.values())[1] == {}
    assert agent.verified(backup.values())[1] == {}
    assert {key: r.in_place_of_newer for key, r in daemon.verified(backup.values())[1].items()} == {A.state: True}


@pytest.mark.parametrize("forged", [b"{}", b"{}\nelasticd-signed-1 d187596d first " + b"9" * 20 + b" - ab"])
def test_what_was_read_counts_on_whatever_is_written_over_it(world: World, forged: bytes) -> None:
    daemon = world.daemon()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    world.write(A.state, forged)
    world.write(B.state, forged)
    found = daemon.verified(world.kvs.values())[1]
    assert {key: r.in_place_of_newer for key, r in found.items()} == {A.state: True, B.state: False}
    other = world.daemon(bytes(32))
    assert not any(r.in_place_of_newer for r in other.verified(world.kvs.values())[1].values())


def test_an_agent_takes_no_record_that_is_older_than_what_its_daemon_has_read(world: World) -> None:
    daemon = world.daemon()
    world.submit(daemon)
    daemon.verified(world.kvs.values())
    before = world.kvs[A.state].value
    world.txn(daemon, Put(A.state, encode(JobState(phase=Phase.STOPPING))))
    daemon.verified(world.kvs.values())
    agent = JobSigner(daemon.job_key("a", "first"), lambda: 1)
    world.write(A.state, before)
    assert refused(world, agent) == {A.state: OLDER}
    world.txn(agent, Put(A.member("n"), b"{}"))
    assert refused(world, daemon).keys() == {A.state}, "its own stamps are newer, whatever its clock says"


def test_what_is_remembered_is_bounded_and_what_is_not_remembered_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamps, "MOST_GONE", 4)
    monkeypatch.setattr(stamps, "MOST_GONE_OF_JOB", 4)
    daemon, old, saved = world.daemon(), dict[str, bytes](), list[stamps.Entry]()
    for number in range(40):
        world.now_ns += 1
        job, drain = f"j{number}", KEYS.drain(f"n{number}")
        world.submit(daemon, job)
        daemon.verified(world.kvs.values())
        for key in (drain, KEYS.job(job).spec):
            old[key] = world.kvs[key].value if key in world.kvs else sealed(daemon, key, b"{}")
            world.txn(daemon, *ending(KEYS, key))
        daemon.verified(world.kvs.values())
        world.kvs.clear()
        daemon.deleted([KEYS.ended(drain), KEYS.ended(KEYS.job(job).spec)])
        saved += daemon.stamps.entries()
    assert len(list(daemon.stamps.all_entries())) < 40
    later = world.daemon()
    later.stamps.load(saved)
    assert sorted(later.stamps.all_entries()) == sorted(daemon.stamps.all_entries())
    for key, value in old.items():
        world.write(key, value)
    assert refused(world, later).keys() == old.keys()
    world.kvs.clear()
    world.submit(later, "new")
    assert refused(world, later) == {}


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
