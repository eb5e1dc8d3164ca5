"""Reading all keys of a prefix at one revision, in pages: none is larger, or takes longer, than a single read may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import protobuf
from .types import KV, EtcdError

FIRST_KEYS = 16
"""Of a page: as large as its values can be (1.5 MB each), they arrive within a call's deadline."""
MOST_KEYS = 4096
PAGE_BYTES = 4_000_000
"""What a page should have: it has more keys than the last one where these are small."""
GROWTH = 8
_COMPACTED = "compacted"
TRIES = 3

Ask = Callable[[dict[str, Any]], Any]


def read(ask: Ask, prefix: str, before: str = "") -> tuple[list[KV], int]:
    """(the keys, the revision). `ask`: one range request with these fields, in one call with a deadline of its own.
    Raises EtcdError."""
    for last in range(1 - TRIES, 1):
        try:
            return _read(ask, protobuf.span(prefix, before))
        except EtcdError as error:  # the revision of the first page may go while the others are read
            if last == 0 or _COMPACTED not in str(error):
                raise
    raise AssertionError("unreachable: the last try returns or raises")


def _read(ask: Ask, span: dict[str, Any]) -> tuple[list[KV], int]:
    kvs: list[KV] = []
    revision, limit, most = 0, FIRST_KEYS, MOST_KEYS
    while True:
        try:
            answer = ask({**span, "limit": limit, "revision": revision})
        except EtcdError:
            if limit <= FIRST_KEYS:
                raise
            limit, most = FIRST_KEYS, limit // GROWTH  # values much larger than those before
            continue
        page = [protobuf.kv(raw) for raw in answer.kvs]
        kvs += page
        revision = revision or answer.header.revision
        if not answer.more:
            return kvs, revision
        span = {**span, "key": answer.kvs[-1].key + b"\0"}
        each_bytes = 1 + sum(len(kv.value) for kv in page) // len(page)
        limit = max(FIRST_KEYS, min(limit * GROWTH, most, PAGE_BYTES // each_bytes))
