"""A generation's places read by what changed: the same, whatever changed, as when all are read."""

from __future__ import annotations

import random

import msgspec
import pytest
from support.jobs import generation, place

from elastic.contract.records.job_records import (
    PROTOCOL,
    Changes,
    GenerationNode,
    GenerationRecord,
    ProtocolVersionMismatch,
    Splice,
    decode,
    encode,
)
from elastic.recovery.facts.generation_delta import GenerationReader, changes, spliced

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


def record(number: int, places: Places, follows: Places | None = None) -> GenerationRecord:
    made = generation(number, places)
    return msgspec.structs.replace(made, changes=changes(follows, places) if follows is not None else None)


def facts(formed: GenerationRecord, nodes: list[str]) -> list[object]:
    return [
        formed.world_size,
        *((formed.at(node), formed.ranks(node), formed.node_of(node, f"{node}.1")) for node in nodes),
    ]


def changes_decoded(before: Places, after: Places) -> Changes:
    found = changes(before, after)
    assert found is not None
    return found


def test_generation_delta_splices_reproduce_the_new_places() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        before = some(rng.randrange(1, 60), rng)
        after = changed(before, rng)
        found = changes(before, after)
        assert found is None or spliced(before, found.splices) == after, f"seed {seed}"


def test_generation_reader_gives_the_same_places_from_changes_as_from_the_full_record() -> None:
    """Also what had been found out about the one before, and is not found out again."""
    for seed in range(500):
        rng = random.Random(seed)
        reader, places = GenerationReader(), some(rng.randrange(2, 80), rng)
        reader.read(encode(record(1, places)))
        for number in range(2, 6):
            after = changed(places, rng) or places
            asked = [p.node for p in rng.sample(after, min(rng.randrange(8), len(after)))] + ["nobody"]
            assert facts(reader.read(encode(record(number - 1, places))), asked)
            raw = encode(record(number, after, follows=places))
            read, whole = reader.read(raw), decode(GenerationRecord, raw)
            assert read == whole, f"seed {seed}"
            assert facts(read, asked) == facts(whole, asked), f"seed {seed}"
            places = after


def test_generation_reader_decodes_only_changed_places() -> None:
    """Else the reader would be correct, and as slow as without."""
    rng = random.Random(1)
    before = some(200, rng)
    after = before[:50] + before[51:]
    reader = GenerationReader()
    first = reader.read(encode(record(1, before)))
    second = reader.read(encode(record(2, after, follows=before)))
    assert second.nodes == after
    assert all(new is old for new, old in zip(second.nodes, first.nodes[:50] + first.nodes[51:], strict=True))
    assert second.changes is not None
    assert second.changes.splices == (Splice(50, 51),)


def test_generation_reader_reads_the_full_record_if_its_base_differs() -> None:
    """A generation was missed; or etcd was set back, and the number has been given twice."""
    rng = random.Random(2)
    first, second = some(100, rng), some(100, rng)
    assert first != second
    reader = GenerationReader()
    reader.read(encode(record(1, first)))
    after = record(3, second[1:], follows=second)
    assert after.changes is not None
    assert reader.read(encode(after)).nodes == second[1:]


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
    after = record(2, kept.nodes[:1], follows=kept.nodes)
    assert reader.read(encode(after)) == after


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
