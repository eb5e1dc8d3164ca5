"""The manifest is believed only whole; shards are cut alike by every rank."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.errors import Damaged
from elastic.checkpoint.format.shard_plan import assign_shards, newest_complete
from elastic.contract.worker.tensor_table import TensorInfo


def shard(number: int = 0, shards: int = 1, name: str = "w") -> m.Shard:
    info = TensorInfo(name, "F32", (3, 4), 48)
    return m.Shard(
        file=m.shard_file(number, shards), shard=number, shards=shards, step=7, generation=2, nbytes=4096 + 48,
        data_at=4096, xxh3=("00" * 8,), tensors=(info,), extra={"lr": 0.1},
    )  # fmt: skip


def manifest(**changes: object) -> m.Manifest:
    whole = m.Manifest(job="job", step=7, generation=2, world_size=2, shards=(shard(0, 2), shard(1, 2, "v")))
    return msgspec.structs.replace(whole, **changes)


def test_manifest_round_trips_and_is_plain_json() -> None:
    raw = m.encode(manifest())
    assert m.decode(raw) == manifest()
    assert m.decode_head(raw) == m.Head(job="job", step=7, generation=2)
    assert json.loads(raw)["body"]["shards"][1]["tensors"][0]["name"] == "v"


def test_no_single_flipped_bit_is_believed() -> None:
    raw = m.encode(manifest()).rstrip()
    for at in range(len(raw)):
        for bit in (0x01, 0x10, 0x80):
            broken = raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]
            try:
                found = m.decode(broken)
            except Damaged:
                continue
            # Only the format's own digit is outside the hash, and an older format has no other meaning.
            assert found == manifest()
            assert at < raw.index(b"xxh3")


def test_manifest_truncated_at_any_length_is_rejected() -> None:
    raw = m.encode(manifest()).rstrip()
    for length in range(len(raw)):
        with pytest.raises(Damaged):
            m.decode(raw[:length])


@pytest.mark.parametrize("format_", [m.FORMAT - 1, m.WITH_BOXES + 1])
def test_manifest_of_another_format_is_not_called_damaged(format_: int) -> None:
    raw = m.encode(manifest()).replace(b'"format":2', b'"format":%d' % format_)
    with pytest.raises(Damaged, match=f"format {format_}; this version reads 2 and 3") as error:
        m.decode(raw)
    assert error.value.reason == "other-format"


@pytest.mark.parametrize(
    "wrong",
    [
        manifest(shards=()),
        manifest(shards=(shard(0, 2),)),
        manifest(shards=(shard(1, 2), shard(0, 2, "v"))),
        manifest(shards=(shard(0, 2), shard(1, 2, "w"))),
        manifest(step=8),
        manifest(generation=3),
        manifest(shards=(msgspec.structs.replace(shard(), file="../../etc/passwd"),)),
        manifest(shards=(msgspec.structs.replace(shard(), nbytes=4096),)),
        manifest(shards=(msgspec.structs.replace(shard(), xxh3=()),)),
        manifest(shards=(msgspec.structs.replace(shard(), tensors=(TensorInfo("w", "F32", (3, 5), 48),)),)),
        manifest(shards=(msgspec.structs.replace(shard(), tensors=(TensorInfo("w", "X9", (48,), 48),)),)),
    ],
)
def test_manifest_with_contradicting_fields_is_rejected(wrong: m.Manifest) -> None:
    with pytest.raises(Damaged):
        m.decode(m.encode(wrong))


sizes = st.lists(st.integers(0, 1000), max_size=60)


@given(sizes, st.integers(1, 20))
def test_shards_contain_each_tensor_once_and_are_balanced(nbytes: list[int], count: int) -> None:
    table = tuple(TensorInfo(str(i), "U8", (n,), n) for i, n in enumerate(nbytes))
    shards = assign_shards(table, count)
    assert len(shards) == count
    assert sorted(i for s in shards for i in s) == list(range(len(table)))
    assert all(list(s) == sorted(s) for s in shards)
    loads = [sum(nbytes[i] for i in s) for s in shards]
    assert max(loads) - min(loads) <= max(nbytes, default=0)
    assert shards == assign_shards(table, count)


def test_no_shard_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="count = 0"):
        assign_shards((), 0)


def test_the_newest_whole_snapshot_counts_shards_and_generations() -> None:
    assert newest_complete([]) is None
    whole = [(1, 50, 0, 2), (1, 50, 1, 2)]
    assert newest_complete([*whole, (1, 60, 0, 2)]) == (1, 50, 2)
    assert newest_complete([*whole, (2, 40, 0, 1)]) == (2, 40, 1)
    assert newest_complete([(1, 60, 0, 2), (1, 60, 1, 3)]) is None
