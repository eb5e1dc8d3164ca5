"""A prefix of any size is read in pages, each within what one call may carry, all at one revision."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.etcd import pages
from elastic.etcd.types import EtcdError, EtcdUnavailable

CALL_BYTES = 30_000_000
"""More than this does not arrive within a deadline."""


@dataclass
class Store:
    """Answers ranges as etcd does."""

    sizes: dict[str, int]
    revision: int = 7
    limits: list[int] = field(default_factory=list)
    down_after: int = 10**9
    compacted_at: frozenset[int] = frozenset()
    """Numbers of the calls that find their revision gone."""

    def __call__(self, asked: dict[str, Any]) -> Any:
        self.limits.append(asked["limit"])
        if len(self.limits) > self.down_after:
            raise EtcdUnavailable("no answer")
        if len(self.limits) in self.compacted_at:
            raise EtcdError("required revision has been compacted")
        assert asked["revision"] in (0, 7), "all pages are of the first one's revision"
        keys = [key for key in sorted(self.sizes) if asked["key"] <= key.encode() < asked["range_end"]]
        page = keys[: asked["limit"]]
        if sum(self.sizes[key] for key in page) > CALL_BYTES:
            raise EtcdUnavailable("deadline exceeded")
        rows = [SimpleNamespace(key=k.encode(), value=bytes(self.sizes[k]), create_revision=1, mod_revision=1, lease=0)
                for k in page]  # fmt: skip
        return SimpleNamespace(kvs=rows, more=len(keys) > len(page), header=SimpleNamespace(revision=self.revision))


def keys(count: int, nbytes: int, first: int = 0) -> dict[str, int]:
    return {f"/t/{first + i:06d}": nbytes for i in range(count)}


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ({}, 1),
        (keys(16, 1), 1),
        (keys(17, 1), 2),
        (keys(20_000, 100), 8),
        (keys(60, 1_500_000), 4),
        ({**keys(2000, 10), **keys(200, 1_000_000, first=2000)}, 27),
    ],
    ids=["empty", "one page", "two pages", "many small", "few large", "large ones after small ones"],
)
def test_every_key_is_read_once_in_few_calls(sizes: dict[str, int], calls: int) -> None:
    store = Store({**sizes, "/s": 1, "/u": 1})
    found, revision = pages.read(store, "/t/")
    assert [kv.key for kv in found] == sorted(sizes)
    assert revision == 7
    assert len(store.limits) <= calls


def test_a_store_that_stops_answering_is_said_after_one_smaller_try() -> None:
    store = Store(keys(20_000, 100), down_after=3)
    with pytest.raises(EtcdUnavailable):
        pages.read(store, "/t/")
    assert len(store.limits) == 5


def test_a_revision_that_is_compacted_meanwhile_begins_anew() -> None:
    store = Store(keys(20, 100), compacted_at=frozenset({2, 3}))
    assert len(pages.read(store, "/t/")[0]) == 20
    with pytest.raises(EtcdError, match="compacted"):
        pages.read(Store(keys(20, 1), compacted_at=frozenset(range(2, 99))), "/t/")
