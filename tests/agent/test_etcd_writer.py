"""What an agent writes: failures once, nothing after the end, and why a generation could not be published."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from pathlib import Path

import msgspec
import pytest
from support.fake_etcd import FakeClient, FakeServer
from support.jobs import changed, generation, member, place, policy

from elastic.agent.etcd.member_writes import STORE_SECRET_NBYTES
from elastic.agent.etcd.writer import KEPT_BESIDE, EtcdWriter
from elastic.agent.peers.store import Stores
from elastic.agent.reports.incidents import late_exit, save_failed, stray_checkpoints
from elastic.agent.workers.process import Exited
from elastic.agent.write_queue import Write, WriteQueue
from elastic.checkpoint.format.names import tmp_name
from elastic.contract.job.spec import Checkpoint, JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.generation_delta import GenerationReader
from elastic.contract.records.incident_account import IncidentAccount, Outcome
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    Phase,
    ProgressRecord,
    SpecRecord,
    WorkerError,
    decode,
    encode,
)
from elastic.contract.records.rank_records import RanksRecord
from elastic.contract.records.reasons import Code, codes
from elastic.etcd.client import EtcdUnavailable
from elastic.recovery.facts.membership import Change
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import Publish, PutState
from elastic.recovery.machine.events import Event, PublishFailed
from elastic.recovery.machine.model import LARGE_JOB_NODES, Agent
from elasticd.api.views.views import steps_lost

KEYS = ClusterKeys("c").job("job")


class AtOnce(WriteQueue):
    """A queue that carries out orders as they are asked for, and again as often as the test says."""

    def __init__(self, name: str) -> None:
        self.orders: list[Write] = []

    def start(self) -> None: ...

    def ask(self, key: str, order: Write, *, persist: bool) -> None:
        self.orders.append(order)

    def close(self, wait_s: float) -> None: ...


class WriterHarness:
    def __init__(self, **checkpoint: object) -> None:
        spec = JobSpec(name="job", script="x.py", checkpoint=msgspec.convert(checkpoint, Checkpoint))
        self.policy = policy("n", spec=spec)
        self.client = FakeClient(FakeServer())
        self.posted: list[Event] = []
        self.queues: dict[str, AtOnce] = {}
        self.now_s = 1000.0
        self.stores = Stores("203.0.113.1")  # an address that is not ours
        self.writer = EtcdWriter(
            self.client,  # type: ignore[arg-type]
            KEYS,
            self.policy,
            self.stores,
            self.posted.append,
            SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="me"),
            queue=self._queue,
            wall=lambda: self.now_s,
        )
        self.client.put(KEYS.spec, encode(self.writer.spec))

    def _queue(self, name: str) -> AtOnce:
        return self.queues.setdefault(name, AtOnce(name))

    def state(self) -> JobState:
        kv = self.client.get(KEYS.state)
        return decode(JobState, kv.value) if kv else JobState()


BROKEN = BrokenRecord(generation=0, node="n", kind="exit", detail="ValueError", fingerprint="ValueError at x.py:1")


def test_error_record_with_invalid_utf8_text_is_written() -> None:
    harness = WriterHarness()
    error = WorkerError(node="n", slot=0, rank=0, message="FileNotFoundError: 'caf\udce9.png'", traceback="\udce9")
    record = msgspec.structs.replace(BROKEN, generation=1, detail="caf\udce9", error=error)
    harness.writer.put_broken(record, None)
    state = JobState(restarts=1, error=error)
    harness.client.put(KEYS.member("n"), b"")
    harness.writer.put_state(PutState(state, 0))
    for queue in harness.queues.values():
        for order in queue.orders:
            order()
    written = decode(BrokenRecord, harness.client.server.kvs[KEYS.broken(1)].value)
    assert written.error is not None
    assert (written.detail, written.error.message) == ("caf\\udce9", "FileNotFoundError: 'caf\\udce9.png'")
    assert harness.state().restarts == 1
    assert harness.state().error is not None


def test_state_is_written_only_over_the_revision_that_it_was_decided_on() -> None:
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"")
    harness.client.put(KEYS.state, encode(JobState(phase=Phase.SUCCEEDED)))
    harness.writer.put_state(PutState(JobState(phase=Phase.FAILED), 1))
    harness.queues["urgent"].orders[-1]()
    assert harness.state().phase is Phase.SUCCEEDED


def test_the_end_of_a_job_is_written_together_with_its_last_step() -> None:
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"")
    last = ProgressRecord(generation=1, world_size=2, step=160, steps_per_s=1.0, loss=None, wall_s=1.0)
    harness.writer.put_state(PutState(JobState(phase=Phase.WAITING), 0), lambda: last)
    harness.queues["urgent"].orders.pop()()
    assert KEYS.progress not in harness.client.server.kvs
    revision = harness.client.get(KEYS.state).mod_revision  # type: ignore[union-attr]
    harness.writer.put_state(PutState(JobState(phase=Phase.SUCCEEDED), revision), lambda: last)
    harness.queues["lazy"].orders.pop()()
    written = harness.client.server.kvs
    assert decode(ProgressRecord, written[KEYS.progress].value) == last
    assert written[KEYS.progress].mod_revision == written[KEYS.state].mod_revision


def test_a_job_that_has_succeeded_shows_no_open_incident() -> None:
    """A rank that is killed at the end of `train` is replaced, and the job is complete at once: a script that waits for
    the phase reads the incidents next."""
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"")
    over = IncidentAccount(first=1, last=2, outcome=Outcome.STEPPING)
    for account in (msgspec.structs.replace(over, outcome=Outcome.OPEN), over):
        harness.writer.put_account(account)
    harness.writer.put_state(PutState(JobState(phase=Phase.SUCCEEDED), 0))
    for name in ("urgent", "lazy"):  # the one thread is ahead of the other
        for order in harness.queues[name].orders:
            order()
    written = harness.client.server.kvs
    own = written[KEYS.account(1, "n", harness.policy.incarnation)]
    assert decode(IncidentAccount, own.value) == over
    assert own.mod_revision < written[KEYS.state].mod_revision


def test_failure_counted_at_the_same_moment_does_not_displace_the_end_of_the_job() -> None:
    """`on_bad_numbers = stop` is written once: displaced in the queue, the job would go on."""
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"")
    harness.client.put(KEYS.state, encode(JobState(phase=Phase.RUNNING)))
    revision = harness.client.get(KEYS.state).mod_revision  # type: ignore[union-attr]
    writer = dataclasses.replace(harness.writer, queue=WriteQueue)
    writer.put_state(PutState(JobState(phase=Phase.FAILED, reason="nan at step 3"), revision))
    writer.put_state(PutState(JobState(phase=Phase.RUNNING, restarts=1), revision))
    writer.start()
    writer.leave()
    assert harness.state().reason == "nan at step 3"


def publish(harness: WriterHarness) -> Write:
    effect = Publish(1, Change((), "first", planned=False), 0, None, None)
    harness.writer.publish(effect, JobView())
    return harness.queues["urgent"].orders[-1]


def test_a_publication_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = WriterHarness()

    def broken(generation: int, basis: object) -> tuple[str, int]:
        raise RuntimeError("no store")

    monkeypatch.setattr(harness.stores, "open", broken)
    with pytest.raises(RuntimeError):
        publish(harness)()
    assert harness.posted == [PublishFailed(1)]
    monkeypatch.setattr(harness.client, "txn", lambda *_: (_ for _ in ()).throw(EtcdUnavailable("x", maybe_done=False)))
    harness.writer.stores = Stores("203.0.113.1")
    with pytest.raises(EtcdUnavailable):
        publish(harness)()
    assert harness.posted == [PublishFailed(1)] * 2


@pytest.mark.parametrize("member", [True, False])
def test_only_a_member_publishes_and_changes_the_phase(member: bool) -> None:
    """A wiped etcd may be back at the revision that was decided on; we are no member in it before we rejoin."""
    harness = WriterHarness()
    if member:
        harness.client.put(KEYS.member("n"), b"ours")
    harness.writer.put_state(PutState(JobState(phase=Phase.WAITING), 0))
    phase = harness.queues["urgent"].orders[-1]
    publish(harness)()
    assert (harness.client.get(KEYS.generation) is not None) is member
    assert harness.posted == ([] if member else [PublishFailed(1)])
    harness.client.delete(KEYS.state)
    phase()
    assert harness.state().phase is (Phase.WAITING if member else Phase.PENDING)
    harness.stores.close()


def test_each_generation_has_a_secret_of_its_own() -> None:
    found = []
    for _ in range(2):
        harness = WriterHarness()
        harness.client.put(KEYS.member("n"), b"ours")
        publish(harness)()
        kv = harness.client.get(KEYS.generation)
        assert kv is not None
        found.append(decode(GenerationRecord, kv.value).store_secret)
        harness.stores.close()
    assert [len(bytes.fromhex(secret)) for secret in found] == [STORE_SECRET_NBYTES] * 2
    assert found[0] != found[1]


def test_a_store_opens_whether_its_address_can_be_reached_or_not() -> None:
    stores = Stores("203.0.113.1")
    host, port = stores.open(1)
    assert host == "203.0.113.1"
    with socket.create_connection(("127.0.0.1", port), timeout=30):
        pass
    assert stores.open(1) == (host, port)
    stores.close()


def port_of(harness: WriterHarness) -> int:
    kv = harness.client.server.kvs[KEYS.generation]
    return decode(GenerationRecord, kv.value).store_port


def test_a_publication_that_was_not_heard_of_is_tried_again_with_its_store() -> None:
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"ours")
    harness.client.lose_answers = True
    with pytest.raises(EtcdUnavailable):
        publish(harness)()
    harness.client.lose_answers = False
    there = port_of(harness)
    for key in (KEYS.generation, KEYS.state):
        harness.client.delete(key)
    publish(harness)()
    assert port_of(harness) == there
    harness.stores.close()


def test_generation_number_reused_after_etcd_wipe_gets_a_fresh_store() -> None:
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"ours")
    harness.client.lose_answers = True
    with pytest.raises(EtcdUnavailable):
        publish(harness)()
    harness.client.lose_answers = False
    there = port_of(harness)
    harness.client.server.wipe()
    harness.writer.restore(None, JobState(), None)
    harness.queues["urgent"].orders[-1]()
    harness.client.put(KEYS.member("n"), b"ours")
    state = harness.client.server.kvs[KEYS.state].mod_revision
    harness.writer.publish(Publish(1, Change((), "first", planned=False), 0, None, None), JobView(state_revision=state))
    harness.queues["urgent"].orders[-1]()
    assert port_of(harness) != there
    harness.stores.close()


@pytest.mark.parametrize(("nodes", "large"), [(LARGE_JOB_NODES, False), (LARGE_JOB_NODES + 2, True)])
def test_large_generation_record_is_its_changes(nodes: int, large: bool) -> None:
    """So that a reader of the one before is sent and decodes next to nothing; any other has the base."""
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"ours")
    reader = GenerationReader()
    before = reader.read(encode(generation(1, [place(f"n{i}") for i in range(nodes)])))
    revision = harness.client.put(KEYS.generation, encode(before))
    after = before.nodes[1:]
    effect = Publish(2, Change(after, "n0 is gone", planned=False), revision, None, None)
    harness.writer.publish(effect, JobView(generation=before, generation_revision=revision, base=reader.base))
    harness.queues["urgent"].orders[-1]()
    harness.stores.close()
    written = harness.client.server.kvs[KEYS.generation].value
    assert (len(written) < 500) is large
    base = harness.client.server.kvs.get(KEYS.base)
    assert (base is not None) is large
    read = reader.read(written).nodes
    assert read == after == GenerationReader().read(written, base.value if base else None).nodes
    assert all(a is b for a, b in zip(read, before.nodes[1:], strict=True)) is large


def test_a_large_generation_is_not_published_without_its_base() -> None:
    """etcd was wiped and the generation written back, at the revision that it had, since the leader last looked."""
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"ours")
    reader = GenerationReader()
    before = reader.read(encode(generation(1, [place(f"n{i}") for i in range(LARGE_JOB_NODES + 2)])))
    revision = harness.client.put(KEYS.generation, encode(before))
    view = JobView(generation=before, generation_revision=revision, base=reader.base, base_revision=revision - 1)
    after = Change(before.nodes[1:], "n0 is gone", planned=False)
    harness.writer.publish(Publish(2, after, revision, None, None), view)
    harness.queues["urgent"].orders[-1]()
    harness.stores.close()
    assert harness.client.server.kvs[KEYS.generation].value == encode(before)


def test_a_store_is_another_on_another_basis() -> None:
    stores = Stores("203.0.113.1")
    _, first = stores.open(3, 7)
    assert stores.open(3, 7)[1] == first
    _, second = stores.open(3, 9)
    assert second != first
    assert stores.open(3, 9)[1] == second
    stores.close()


def test_a_new_agents_record_is_younger_than_its_predecessors_and_then_keeps_its_age() -> None:
    """A fast restart finds the old record still there; by its age the others tell that a store there is gone."""
    harness, key = WriterHarness(), KEYS.member("n")
    harness.client.put(key, b"its predecessor's")
    ages = [harness.client.server.kvs[key].create_revision]
    for _ in range(2):
        harness.writer.rejoin(MemberRecord(node="n", incarnation="i", host="h", port=1, slots=1))
        harness.queues["urgent"].orders[-1]()
        ages.append(harness.client.server.kvs[key].create_revision)
    assert ages[0] < ages[1] == ages[2]


def test_an_agent_writes_what_it_tells_of_each_incident_under_a_key_of_its_own() -> None:
    harness = WriterHarness()
    begun = IncidentAccount(first=1, last=1)
    over = msgspec.structs.replace(begun, outcome=Outcome.STEPPING)
    accounts = [begun, over, msgspec.structs.replace(over, repeat=1), msgspec.structs.replace(begun, first=2, last=2)]
    for account in accounts:
        harness.writer.put_account(account)
        harness.queues["lazy"].orders[-1]()
    kvs = harness.client.get_prefix(KEYS.incidents).kvs
    assert [decode(IncidentAccount, kvs[key].value) for key in sorted(kvs)] == accounts[1:]
    assert all(KEYS.is_account(key) and f".n.{harness.policy.incarnation}." in key for key in kvs)


def test_late_exits_write_one_incident_each_with_no_steps_lost() -> None:
    harness = WriterHarness()
    agent = Agent(harness.policy)
    for worker_id, slot in ((4, 0), (5, 1)):  # before their first generation: neither has a rank
        record = late_exit(agent, slot, Exited(worker_id, 0, None, 0, late_s=3.0), "", None, 10.0)
        assert record is not None
        harness.writer.put_beside("exit", record, worker_id)
        harness.queues["lazy"].orders[-1]()
    found = [decode(IncidentRecord, kv.value) for kv in harness.client.get_prefix(KEYS.incidents).kvs.values()]
    assert sorted(i.text.partition(" had")[0] for i in found) == ["the process of slot 0", "the process of slot 1"]
    assert {(i.open, i.ended_wall_s, steps_lost(i)) for i in found} == {(False, 10.0, "0 steps")}
    assert late_exit(agent, 0, Exited(4, 1, None, 0, late_s=3.0), "", None, 10.0) is None, (
        "its failure is told of already"
    )


def test_checkpoints_that_fail_without_end_do_not_fill_etcd() -> None:
    harness = WriterHarness()
    for step in range(1, KEPT_BESIDE + 3):
        harness.writer.put_beside("save", save_failed(Agent(harness.policy), step, "no space left", 10.0), step)
        harness.queues["lazy"].orders[-1]()
    kvs = harness.client.get_prefix(KEYS.incidents).kvs.values()
    assert {decode(IncidentRecord, kv.value).step for kv in kvs} == set(range(3, KEPT_BESIDE + 3)), "the newest stay"


def test_checkpoints_of_a_node_that_joins_late_are_told_once_if_the_job_goes_on_without_them(tmp_path: Path) -> None:
    """They outrank the job's own by their numbers."""
    harness = WriterHarness(dir=str(tmp_path), shared=False)
    (tmp_path / tmp_name(60, 7, "job")).mkdir()
    harness.writer.rejoin(member("n").record)
    harness.queues["urgent"].orders[-1]()
    others, joined = generation(6, [place("m")]), generation(7, [place("m"), place("n")])
    outside = changed(Agent(harness.policy), generation=others)
    inside = changed(outside, generation=joined)
    saved = harness.writer.saved_generation
    told = stray_checkpoints(outside, inside, saved, 10.0)
    assert told is not None
    assert (told.kind, told.node, told.open, told.steps_lost) == ("checkpoint", "n", False, 0)
    assert f"{tmp_path} on n has a checkpoint of generation 7; the job is in generation 7" in told.text
    harness.writer.put_beside("stray", told)
    harness.queues["lazy"].orders[-1]()
    assert decode(IncidentRecord, harness.client.server.kvs[KEYS.beside_incident("stray", 7, "n")].value) == told
    assert stray_checkpoints(inside, changed(inside, generation=joined), saved, 10.0) is None, "it was there before"
    assert stray_checkpoints(outside, changed(outside, generation=others), saved, 10.0) is None, "it has no place"
    above = generation(8, [place("m"), place("n")])
    assert stray_checkpoints(outside, changed(outside, generation=above), saved, 10.0) is None, "the job's are newer"
    harness.writer.leave()


def report(node: str, *slots: int, kind: str = "exit") -> BrokenRecord:
    return BrokenRecord(generation=3, node=node, kind=kind, detail=f"{kind} on {node}", slots=slots, step=7)


def test_all_reports_of_a_broken_generation_are_kept_and_the_death_comes_first() -> None:
    harness = WriterHarness()
    reports = [report("a", kind="comm"), report("b", 0), report("c", 1), report("b", 0), report("d", kind="comm")]
    for said in reports:
        harness.writer.put_broken(said, None)
        harness.queues["urgent"].orders[-1]()
    kv = harness.client.get(KEYS.broken(3))
    assert kv is not None
    kept = decode(BrokenRecord, kv.value)
    assert (kept.kind, kept.node, kept.slots) == ("exit", "b", (0,))
    assert [(loss.node, loss.slots) for loss in kept.also] == [("c", (1,))]
    assert kept.lost("c") == {1}


def test_reports_of_two_ranks_of_a_node_are_both_kept_though_the_first_is_not_written_yet() -> None:
    """The queue keeps the newest order of each key: neither report may displace the other."""
    harness = WriterHarness()
    writer = dataclasses.replace(harness.writer, queue=WriteQueue)
    for rank, step in ((2, 10), (3, 11)):
        said = msgspec.structs.replace(report("n", kind="bad loss"), ranks=(rank,), step=step)
        writer.put_broken(said, None)
    writer.start()
    writer.leave()
    kv = harness.client.get(KEYS.broken(3))
    assert kv is not None
    kept = decode(BrokenRecord, kv.value)
    assert (kept.ranks, kept.step) == ((2,), 10), "the rank of the earlier step is the cause"
    assert [loss.ranks for loss in kept.also] == [(3,)]


@pytest.mark.parametrize("shared", [False, True])
def test_an_agent_says_which_generation_its_own_checkpoint_folder_has(tmp_path: Path, shared: bool) -> None:
    harness = WriterHarness(dir=str(tmp_path), shared=shared)
    (tmp_path / tmp_name(60, 7, "job")).mkdir()
    harness.writer.rejoin(member("n").record)
    harness.queues["urgent"].orders[-1]()
    harness.writer.put_member(member("n", ready=(0,)).record)
    harness.queues["urgent"].orders[-1]()
    said = decode(MemberRecord, harness.client.server.kvs[KEYS.member("n")].value)
    assert said.saved_generation == (0 if shared else 7)
    harness.writer.leave()


@pytest.mark.parametrize("by", ["one agent", "a second one, which holds a newer one"])
def test_a_generation_that_was_written_back_is_known_by_its_revision(by: str) -> None:
    harness = WriterHarness()
    former = generation(5, [place("n", 0)])
    spec = SpecRecord(spec=harness.policy.spec, submitted_wall_s=0.0, submitted_by="me")

    def seen() -> JobView:
        server = harness.client.server
        return JobView.read(KEYS, server.kvs, server.revision)

    harness.client.put(KEYS.spec, encode(spec))
    harness.client.put(KEYS.generation, encode(former))
    assert not seen().written_back
    harness.client.server.wipe()
    older = generation(4, [place("n", 0)])
    for record in [former] if by == "one agent" else [older, former]:
        harness.writer.restore(record, JobState(), spec)
        harness.queues["urgent"].orders[-1]()
    assert seen().generation == former
    assert seen().written_back
    harness.client.put(KEYS.generation, encode(generation(6, [place("n", 0)])))
    assert not seen().written_back


def test_a_generation_is_not_written_back_into_another_submission_of_the_name() -> None:
    """The job was over, and another has taken its name (`--replace`) before this agent left: that would never form."""
    harness = WriterHarness()
    other = SpecRecord(spec=harness.policy.spec, submitted_wall_s=9.0, submitted_by="me", submission="another")
    harness.client.put(KEYS.spec, encode(other))
    harness.writer.restore(generation(1, [place("n", 0)]), JobState(), harness.writer.spec)
    harness.queues["urgent"].orders[-1]()
    assert [key for key in (KEYS.generation, KEYS.restored, KEYS.state) if key in harness.client.server.kvs] == []


@pytest.mark.parametrize("what", ["failure", "late exit", "checkpoint", "ranks"])
def test_no_report_of_an_agent_gets_into_another_submission_of_the_name(what: str) -> None:
    """Its job was over, and another has taken the name while it still ended its workers: the failure would break the
    generation of that number, and the incident be taken for one of the new job."""
    harness = WriterHarness()
    other = SpecRecord(spec=harness.policy.spec, submitted_wall_s=9.0, submitted_by="me", submission="another")
    incident = IncidentRecord(generation=2, kind=what, node="n", ranks=(0,), detail="late", wall_s=1.0, step=5)

    def report() -> None:
        match what:
            case "failure":
                harness.writer.put_broken(msgspec.structs.replace(BROKEN, generation=1), None)
            case "late exit":
                harness.writer.put_beside("exit", incident, 7)
            case "checkpoint":
                harness.writer.put_beside("save", incident, incident.step or 0)
            case "ranks":
                harness.writer.put_ranks(RanksRecord(node="n", generation=1, wall_s=1.0))
        for queue in harness.queues.values():
            for order in queue.orders:
                order()

    harness.client.put(KEYS.spec, encode(other))
    report()
    assert list(harness.client.server.kvs) == [KEYS.spec]
    harness.client.put(KEYS.spec, encode(harness.writer.spec))
    report()
    assert len(harness.client.server.kvs) == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_is_reported_although_the_description_changes_meanwhile(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`elasticctl scale` writes it at the moment of the failure: the report is not of another job for that."""
    harness = WriterHarness()
    spec, ours = harness.writer.spec, msgspec.structs.replace(BROKEN, generation=1, slots=(0,))
    harness.client.put(KEYS.spec, encode(spec))
    key = KEYS.broken(1)
    if not first:
        harness.client.put(key, encode(msgspec.structs.replace(ours, node="m")))
    read, changes = harness.client.get, [KEYS.spec]

    def get(asked: str) -> object:
        found = read(asked)
        if asked in changes:
            changes.remove(asked)
            harness.client.put(KEYS.spec, encode(spec))
        return found

    monkeypatch.setattr(harness.client, "get", get)
    harness.writer.put_broken(ours, None)
    for _ in range(2):  # as the queue does
        with contextlib.suppress(EtcdUnavailable):
            harness.queues["urgent"].orders[-1]()
            break
    told = decode(BrokenRecord, harness.client.server.kvs[key].value)
    assert {told.node, *(loss.node for loss in told.also)} == {BROKEN.node, *(() if first else ("m",))}


def test_an_agent_that_still_ends_writes_nothing_of_a_job_that_is_forgotten() -> None:
    """`status` shows a forgotten job for as long as such a record lies in etcd, and `forget` does not remove it."""
    harness = WriterHarness()
    late = IncidentRecord(generation=2, kind="late exit", node="n", ranks=(0,), detail="late", wall_s=1.0)
    harness.writer.put_beside("exit", late, 7)
    harness.writer.put_ranks(RanksRecord(node="n", generation=1, wall_s=1.0))
    harness.client.server.kvs.clear()
    for order in harness.queues["lazy"].orders:
        with contextlib.suppress(EtcdUnavailable):  # to be written once the spec is there again
            order()
    assert not harness.client.server.kvs
    harness.client.put(KEYS.spec, encode(harness.writer.spec))
    for order in harness.queues["lazy"].orders:
        order()
    assert sorted(harness.client.server.kvs) == [KEYS.spec, KEYS.beside_incident("exit", 2, "n", 7), KEYS.ranks_of("n")]


def test_a_planned_generation_is_not_published_over_a_failure_of_the_one_before_whatever_its_number() -> None:
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"ours")
    harness.client.put(KEYS.generation, encode(former := generation(1, [place("n", 0)])))
    at = harness.client.server.kvs[KEYS.generation].mod_revision
    seen = JobView(generation=former, generation_revision=at)
    effect = Publish(11, Change((place("n", 0),), "m joins", planned=True), at, 12, None)
    harness.client.put(KEYS.broken(1), encode(msgspec.structs.replace(BROKEN, generation=1)))
    harness.writer.publish(effect, seen)
    harness.queues["urgent"].orders[-1]()
    assert decode(GenerationRecord, harness.client.server.kvs[KEYS.generation].value).number == 1
    harness.client.delete(KEYS.broken(1))
    harness.queues["urgent"].orders[-1]()
    written = decode(GenerationRecord, harness.client.server.kvs[KEYS.generation].value)
    assert (written.number, written.before) == (11, 1)
    harness.stores.close()


def test_records_of_numbers_below_those_that_were_left_out_are_deleted_but_not_what_is_shown() -> None:
    harness = WriterHarness()
    harness.client.put(KEYS.member("n"), b"ours")
    harness.client.put(KEYS.generation, encode(former := generation(499, [place("n", 0)])))
    for number in (3, 4, 299, 300):
        harness.client.put(KEYS.broken(number), b"")
        harness.client.put(KEYS.account(number, "n", "x"), b"")
        harness.client.put(KEYS.beside_incident("save", number, "n", 7), b"")
    at = harness.client.server.kvs[KEYS.generation].mod_revision
    change = Change((place("n", 0),), "lost", planned=False)
    for shown, left in (((IncidentAccount(first=4, last=4),), {4, 299, 300}), ((), set())):
        seen = JobView(generation=former, generation_revision=at, accounts=shown)
        harness.writer.publish(Publish(500, change, at, None, None), seen)
        harness.queues["urgent"].orders[-1]()
        at = harness.client.server.kvs[KEYS.generation].mod_revision
        kvs = harness.client.server.kvs
        assert {number for number in range(500) if KEYS.account(number, "n", "x") in kvs} == left
        assert {number for number in range(500) if KEYS.broken(number) in kvs} == left
        assert {number for number in range(500) if KEYS.beside_incident("save", number, "n", 7) in kvs} == left
    harness.stores.close()


def test_a_report_that_etcd_finds_too_large_is_written_without_its_long_texts() -> None:
    """A failure that is not reported breaks no generation: the job would stand still."""
    harness, long = WriterHarness(), "x" * 1_600_000
    error = WorkerError(node="n", slot=0, rank=0, message="ValueError: planted", traceback=long)
    record = msgspec.structs.replace(BROKEN, generation=1, slots=(0,), error=error, stacks={"rank 0": long})
    harness.writer.put_broken(record, None)
    harness.writer.put_account(IncidentAccount(first=1, last=1, why=long))
    incident = IncidentRecord(
        generation=2, kind="late exit", node="n", ranks=(0,), detail=long, wall_s=1.0, error=error
    )
    harness.writer.put_beside("exit", incident, 7)
    for queue in harness.queues.values():
        for order in queue.orders:
            order()
    broken = decode(BrokenRecord, harness.client.server.kvs[KEYS.broken(1)].value)
    assert broken.error is not None
    assert (broken.slots, broken.fingerprint, broken.error.message) == ((0,), record.fingerprint, "ValueError: planted")
    assert codes(broken.detail) == {Code.CUT}
    assert str(broken.detail).startswith("ValueError (")
    assert 0 < len(broken.error.traceback) == len(broken.stacks["rank 0"]) <= 4000
    written = decode(IncidentRecord, harness.client.server.kvs[KEYS.beside_incident("exit", 2, "n", 7)].value)
    assert (written.kind, 1000 < len(str(written.detail)) <= 4100) == ("late exit", True)
    told = decode(IncidentAccount, harness.client.server.kvs[KEYS.account(1, "n", harness.policy.incarnation)].value)
    assert (told.first, 1000 < len(str(told.why)) <= 4000) == (1, True)
