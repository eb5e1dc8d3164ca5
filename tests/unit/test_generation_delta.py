"""A generation's places read by what changed: the same, whatever changed, as when all are read."""

from __future__ import annotations

import random

import msgspec
import pytest
from support.jobs import generation, place

from elastic.contract.records.generation_delta import (
    BaseMissing,
    GenerationReader,
    Written,
    changes,
    spliced,
    written,
)
from elastic.contract.records.job_records import (
    PROTOCOL,
    BaseRecord,
    Changes,
    GenerationDelta,
    GenerationNode,
    GenerationRecord,
    ProtocolVersionMismatch,
    Splice,
    decode,
    encode,
)

Places = tuple[GenerationNode, ...]


def changed(before: Places, rng: random.Random) -> Places:
    """Some gone, some come, some with other slots, some in another place."""
    kept = [p for p in before if rng.random() < 0.9]
    for _ in range(rng.randrange(3)):
        kept.append(place(f"new{rng.randrange(10**6)}", *range(rng.randrange(1, 4))))
    if kept and rng.random() < 0.5:
        at = rng.randrange(len(kept))
        kept[at] = msgspec.structs.replace(kept[at], slots=(7, 3))
    if kept and rng.random() < 0.5:
        moved = kept.pop(rng.randrange(len(kept)))
        kept.insert(rng.choice((0, len(kept), rng.randrange(len(kept) + 1))), moved)
    return tuple(kept)


def some(count: int, rng: random.Random) -> Places:
    return tuple(place(f"n{i}", *range(rng.randrange(1, 5))) for i in range(count))


class EtcdKeys:
    """What etcd has of a job's generations, and everything that was written to it."""

    def __init__(self, nodes: Places) -> None:
        self.number = 1
        self.generation = encode(generation(1, nodes))
        self.base: bytes | None = None
        self.leader = GenerationReader()
        self.leader.read(self.generation)

    def publish(self, nodes: Places, leader: GenerationReader | None = None) -> Written:
        leader = leader or self.leader
        before = leader.read(self.generation, self.base)
        assert leader.base is not None
        self.number += 1
        is_there = self.base is not None and leader.is_base(self.base)
        told = written(generation(self.number, nodes), before, leader.base, is_there)
        self.generation = encode(told.generation)
        if told.base is not None:
            self.base = encode(told.base)
        return told

    def whole(self, nodes: Places) -> GenerationRecord:
        return generation(self.number, nodes)


def facts(formed: GenerationRecord, nodes: list[str]) -> list[object]:
    return [
        formed.world_size,
        *((formed.at(node), formed.ranks(node), formed.node_of(node, f"{node}.1")) for node in nodes),
    ]


def test_generation_delta_splices_reproduce_the_new_places() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        before = some(rng.randrange(1, 60), rng)
        after = changed(before, rng)
        found = changes(before, after)
        assert found is None or spliced(before, found.splices) == after, f"seed {seed}"


def test_which_nodes_a_later_generation_lacks_is_as_a_look_at_each_says() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        before = some(rng.randrange(1, 60), rng)
        after = changed(before, rng)
        if rng.random() < 0.5:  # records that were read apart share no object
            after = msgspec.json.decode(msgspec.json.encode(after), type=Places)
        old, new = generation(1, before), generation(2, after)
        assert old.changed(new) == [p for p in before if p not in after], f"seed {seed}"
        assert old.absent(new) == [p for p in before if new.node_of(p.node, p.incarnation) is None], f"seed {seed}"


def test_readers_have_the_same_nodes_whatever_they_have_missed() -> None:
    """One sees each generation, others some of them; one begins at each; another leads each time. What was looked up
    in one generation, and is carried over to the next, is the same as well."""
    for seed in range(300):
        rng = random.Random(seed)
        nodes = some(rng.randrange(2, 150), rng)
        etcd, sees_all, sees_some = EtcdKeys(nodes), GenerationReader(), GenerationReader()
        for _ in range(rng.randrange(1, 12)):
            asked = [p.node for p in rng.sample(nodes, min(rng.randrange(8), len(nodes)))] + ["nobody"]
            readers = [sees_all, GenerationReader(), *([sees_some] if rng.random() < 0.4 else [])]
            for reader in readers:
                read = reader.read(etcd.generation, etcd.base)
                assert read == etcd.whole(nodes), f"seed {seed}"
                assert facts(read, asked) == facts(etcd.whole(nodes), asked), f"seed {seed}"
            after = (changed(nodes, rng) if rng.random() < 0.5 else (*nodes[:-1], place(f"last{etcd.number}"))) or nodes
            etcd.publish(after, rng.choice(readers))
            nodes = after


def test_one_that_sees_each_generation_needs_no_base() -> None:
    """Also as the base is replaced by a newer one."""
    rng = random.Random(1)
    nodes = some(640, rng)
    etcd, reader = EtcdKeys(nodes), GenerationReader()
    bases = 0
    for lost in range(150):
        assert reader.read(etcd.generation) == etcd.whole(nodes)
        nodes = (*nodes[: 3 * lost], *nodes[3 * lost + 1 :], place(f"new{lost}"))
        told = etcd.publish(nodes)
        bases += told.base is not None
        assert isinstance(told.generation, GenerationDelta)
        assert len(etcd.generation) < 2000, "the changes since the base are few"
    assert 2 < bases < 20, "and the base is not written each time"


@pytest.mark.parametrize(
    "splices", [(Splice(5, 0),) * 2, (Splice(4, 6), Splice(5, 7)), (Splice(3, 99),), (Splice(-1, 2),)]
)
def test_changes_that_overlap_or_go_beyond_the_base_are_refused(splices: tuple[Splice, ...]) -> None:
    """A job's user may write them, and a daemon reads them."""
    nodes = some(20, random.Random(7))
    reader = GenerationReader()
    before = reader.read(encode(generation(1, nodes)))
    assert reader.base is not None
    delta = written(generation(2, nodes[1:]), before, reader.base, True).generation
    assert isinstance(delta, GenerationDelta)
    wrong = msgspec.structs.replace(delta, changes=Changes(since=reader.base.digest, splices=splices))
    with pytest.raises(msgspec.ValidationError):
        reader.read(encode(wrong))
    assert reader.read(encode(delta)).nodes == nodes[1:]


def test_the_base_is_written_with_the_first_generation_and_not_again_with_the_second() -> None:
    nodes = some(100, random.Random(6))
    first = written(generation(1, nodes), None, None, False)
    assert first == Written(generation(1, nodes), BaseRecord(nodes=nodes))
    reader = GenerationReader()
    before = reader.read(encode(first.generation))
    assert first.base is not None
    assert reader.is_base(encode(first.base))
    assert written(generation(2, nodes[1:]), before, reader.base, True).base is None
    assert written(generation(2, nodes[1:]), before, reader.base, False).base == first.base
    assert written(generation(2, nodes[::-1]), before, reader.base, True).base == BaseRecord(nodes=nodes[::-1])


def test_generation_reader_decodes_only_changed_places() -> None:
    """Else the reader would be correct, and as slow as without."""
    before = some(200, random.Random(1))
    etcd, reader = EtcdKeys(before), GenerationReader()
    first = reader.read(etcd.generation)
    etcd.publish(before[:50] + before[51:])
    second = reader.read(etcd.generation)
    assert all(new is old for new, old in zip(second.nodes, first.nodes[:50] + first.nodes[51:], strict=True))
    assert decode(GenerationDelta, etcd.generation).changes.splices == (Splice(50, 51),)


def test_a_generation_whose_base_is_not_there_is_said_so_and_the_last_one_is_kept() -> None:
    """A generation was missed; or etcd was set back, and the number has been given twice."""
    rng = random.Random(2)
    first, second = some(100, rng), some(100, rng)
    missed = EtcdKeys(second)
    missed.publish(second[1:])
    reader, other = GenerationReader(), encode(BaseRecord(nodes=first))
    kept = reader.read(encode(generation(1, first)))
    for base in (None, other):
        with pytest.raises(BaseMissing):
            reader.read(missed.generation, base)
    assert reader.read(encode(generation(1, first))) is kept
    assert reader.read(missed.generation, missed.base).nodes == second[1:]


def test_a_generation_that_was_written_back_is_the_same_as_it_was() -> None:
    """etcd has lost its data, the base with them: it is whole then, and the next one has its base."""
    nodes = some(100, random.Random(5))
    etcd = EtcdKeys(nodes)
    etcd.publish(nodes[1:])
    reader = GenerationReader()
    lost = reader.read(etcd.generation, etcd.base)
    etcd.generation, etcd.base = encode(lost), None
    assert reader.read(etcd.generation) == lost
    assert etcd.publish(nodes[2:], reader).base == BaseRecord(nodes=nodes[1:])
    assert GenerationReader().read(etcd.generation, etcd.base).nodes == nodes[2:]


def test_equal_bytes_are_the_same_object() -> None:
    reader, raw = GenerationReader(), encode(generation(1, [place("a"), place("b")]))
    assert reader.read(raw) is reader.read(bytes(bytearray(raw)))


def test_much_change_is_not_told() -> None:
    rng = random.Random(3)
    before = some(40, rng)
    assert changes(before, before[::-1]) is None
    assert changes(before, before[:10]) is not None
    assert changes(before, some(40, rng)) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"protocol": 7, "number": 1}',
        b'{"protocol": 7, "number": 1, "store_host": "h", "store_port": 1, "leader": "a", "why": "", "changes": 7}',
        b'{"protocol": 7, "number": 1, "nodes": 7, "store_host": "h", "store_port": 1, "leader": "a", "why": ""}',
        b'{"protocol": 7, "number": 1, "nodes": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    ],
)
def test_generation_reader_rejects_invalid_records_and_keeps_the_last_one(raw: bytes) -> None:
    reader, good = GenerationReader(), encode(generation(1, [place("a"), place("b")]))
    kept = reader.read(good)
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        reader.read(raw)
    assert reader.read(good) is kept
    assert reader.base is not None
    after = generation(2, kept.nodes[:1])
    assert reader.read(encode(written(after, kept, reader.base, True).generation)) == after


def test_another_protocol_is_said_so() -> None:
    raw = encode(msgspec.structs.replace(generation(1, [place("a")]), protocol=PROTOCOL + 1))
    with pytest.raises(ProtocolVersionMismatch):
        GenerationReader().read(raw)


def test_many_nodes_asked_for_are_put_in_order_once() -> None:
    formed = generation(1, some(50, random.Random(4)))
    found = [formed.at(p.node) for p in formed.nodes]
    assert found == list(range(50))
    assert "order" in formed.__dict__
    assert len(formed.asked[0]) < 10
