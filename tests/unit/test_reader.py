"""ViewReader of a job read one after another: what has not changed is not read again, and what is read is the same."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.incident_account import IncidentAccount, Outcome
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationNode,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    Phase,
    ProgressRecord,
    ProtocolVersionMismatch,
    Record,
    SpecRecord,
    encode,
)
from elastic.recovery.facts import view
from elastic.recovery.facts.view import JobReader, JobView

KEYS = ClusterKeys("c").job("job")


@dataclass(frozen=True)
class Key:
    value: bytes
    create_revision: int
    mod_revision: int


class Fake:
    """Keys as etcd keeps them; each job_view is a mapping of its own, of the same objects where nothing has changed."""

    def __init__(self) -> None:
        self.kvs: dict[str, Key] = {}
        self.revision = 1

    def put(self, key: str, record: Record) -> None:
        self.raw(key, encode(record))

    def raw(self, key: str, value: bytes) -> None:
        self.revision += 1
        before = self.kvs.get(key)
        created = before.create_revision if before else self.revision
        self.kvs = {**self.kvs, key: Key(value, created, self.revision)}

    def delete(self, key: str) -> None:
        self.revision += 1
        self.kvs = {k: kv for k, kv in self.kvs.items() if k != key}

    def read(self, reader: JobReader) -> JobView:
        return reader.read(self.kvs, self.revision)


def _member(node: str, *ready: int) -> MemberRecord:
    return MemberRecord(node=node, incarnation=f"i-{node}", host="h", port=1, slots=2, ready=ready)


def _generation(number: int, *nodes: str) -> GenerationRecord:
    places = tuple(GenerationNode(node=n, incarnation=f"i-{n}", host="h", slots=(0,), port=1) for n in nodes)
    return GenerationRecord(number=number, nodes=places, store_host="h", store_port=1, leader=nodes[0], why="")


def _change(etcd: Fake, rng: random.Random) -> None:
    node, number = f"n{rng.randrange(4)}", rng.randrange(1, 4)
    spec = JobSpec(name="job", script="x.py", nodes="1:4", workers_per_node=1)
    progress = ProgressRecord(
        generation=number,
        world_size=1,
        step=1,
        steps_per_s=1.0,
        loss=None,
        wall_s=0.0,
        checkpoint_step=rng.randrange(9),
    )
    match rng.randrange(10):
        case 0 | 1:
            etcd.put(KEYS.member(node), _member(node, *range(rng.randrange(3))))
        case 2:
            etcd.put(KEYS.generation, _generation(number, node))
        case 3:
            etcd.put(KEYS.broken(number), BrokenRecord(generation=number, node=node, kind="exit", detail=node))
        case 4:
            etcd.put(KEYS.state, JobState(phase=rng.choice(list(Phase))))
        case 5:
            etcd.put(KEYS.progress, progress)
        case 6:
            etcd.put(KEYS.spec, SpecRecord(spec=spec, submitted_wall_s=rng.random(), submitted_by="me"))
        case 7:
            told = IncidentAccount(first=number, last=number, outcome=rng.choice(list(Outcome)))
            etcd.put(KEYS.account(number, node, "x", rng.randrange(2)), told)
        case 8 if etcd.kvs:
            etcd.delete(rng.choice(sorted(etcd.kvs)))
        case _:  # as after an outage: all is read anew, and nothing has changed
            etcd.kvs = {key: Key(kv.value, kv.create_revision, kv.mod_revision) for key, kv in etcd.kvs.items()}


@pytest.mark.parametrize("seed", range(30))
def test_view_reader_gives_the_same_view_incrementally_as_afresh(seed: int) -> None:
    rng, etcd, reader = random.Random(seed), Fake(), JobReader(KEYS)
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            _change(etcd, rng)
        found, afresh = etcd.read(reader), etcd.read(JobReader(KEYS))
        assert found == afresh
        assert found.broken_before == afresh.broken_before
        assert found.accounts == afresh.accounts
        head = {key: kv for key, kv in etcd.kvs.items() if key.startswith(KEYS.head)}
        narrow, afresh = (each.read(head, etcd.revision, False) for each in (reader, JobReader(KEYS)))
        assert narrow == afresh
        assert (narrow.broken_before, narrow.accounts) == (afresh.broken_before, ())


def test_view_reader_looks_for_failures_only_when_a_key_of_one_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is a pass over all keys, and a large job has thousands."""
    etcd, reader, looks = Fake(), JobReader(KEYS), 0
    listed = view._numbers

    def counting(keys: Iterable[str], prefix: str) -> Any:
        nonlocal looks
        looks += prefix == KEYS.broken_all
        return listed(keys, prefix)

    monkeypatch.setattr(view, "_numbers", counting)
    etcd.put(KEYS.generation, _generation(2, "n1"))
    etcd.put(KEYS.account(2, "n1", "x"), told := IncidentAccount(first=2, last=2))
    etcd.read(reader)
    for node in ("n1", "n2"):
        etcd.put(KEYS.member(node), _member(node, 0))
        assert etcd.read(reader).accounts == (told,)
    assert looks == 1
    etcd.delete(KEYS.account(2, "n1", "x"))
    assert etcd.read(reader).accounts == ()
    assert looks == 2


def test_view_reader_reuses_unchanged_records_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, reader = Fake(), JobReader(KEYS)
    for node in ("a", "b"):
        etcd.put(KEYS.member(node), _member(node, 0))
    etcd.put(KEYS.generation, _generation(1, "a", "b"))
    before = etcd.read(reader)
    read: list[bytes] = []
    decode = view._member
    monkeypatch.setattr(view, "_member", lambda raw: (read.append(raw), decode(raw))[1])
    etcd.put(KEYS.state, JobState(phase=Phase.RUNNING))
    after = etcd.read(reader)
    assert after.members is before.members
    assert after.generation is before.generation
    etcd.put(KEYS.member("b"), _member("b"))
    changed = etcd.read(reader)
    assert changed.members["a"] is before.members["a"]
    assert changed.members["b"].record.ready == ()
    assert before.members["b"].record.ready == (0,), "a job_view never changes once it was given out"
    assert read == [encode(_member("b"))]


def test_view_reader_keeps_changes_that_came_with_an_unreadable_record() -> None:
    etcd, reader = Fake(), JobReader(KEYS)
    etcd.put(KEYS.member("a"), _member("a", 0))
    etcd.read(reader)
    etcd.put(KEYS.member("a"), _member("a", 0, 1))
    etcd.raw(KEYS.state, b'{"protocol": 99}')
    for _ in range(2):
        with pytest.raises(ProtocolVersionMismatch):
            etcd.read(reader)
    etcd.put(KEYS.state, JobState())
    assert etcd.read(reader) == etcd.read(JobReader(KEYS))
    assert etcd.read(reader).members["a"].record.ready == (0, 1)


def test_an_open_incident_and_its_failure_are_found_across_numbers_that_are_left_out() -> None:
    """After a loss of etcd a generation is numbered above the checkpoints, however far that is."""
    etcd, reader = Fake(), JobReader(KEYS)
    told, later = (IncidentAccount(first=number, last=number) for number in (5, 40))
    beside = IncidentRecord(generation=6, kind="checkpoint", node="n1", ranks=(0,), detail="", wall_s=1.0)
    etcd.put(KEYS.generation, _generation(40, "n1"))
    etcd.put(KEYS.broken(5), BrokenRecord(generation=5, node="n1", kind="exit", detail="n1"))
    for account in (told, later):
        etcd.put(KEYS.account(account.first, "n1", "x"), account)
    etcd.put(KEYS.beside_incident("save", 39, "n1", 7), beside)
    view = etcd.read(reader)
    assert view.accounts == (later, told)
    assert [report.generation for report in view.broken_before] == [5]
