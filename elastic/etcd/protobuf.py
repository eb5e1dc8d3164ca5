"""Keys, compares and operations as the messages of etcd's API, and its key-value pairs as ours.

`pb`: the module of the generated messages, imported only once a connection is needed.
"""

from __future__ import annotations

from typing import Any

from .types import KV, Absent, Compare, Delete, ModIs, Op, Present, Put, key_text


def span(prefix: str, before: str = "") -> dict[str, bytes]:
    """The range of all keys that begin with `prefix` (ASCII, not empty); with `before`, those that sort before it."""
    first = prefix.encode("ascii")
    return {"key": first, "range_end": before.encode("ascii") or first[:-1] + bytes([first[-1] + 1])}


def kv(raw: Any) -> KV:
    return KV(key_text(raw.key), raw.value, raw.create_revision, raw.mod_revision, raw.lease)


def compare(pb: Any, compare: Compare) -> Any:
    c = pb.Compare
    match compare:
        case Absent(key):
            return c(key=key.encode(), target=c.CREATE, result=c.EQUAL, create_revision=0)
        case Present(key):
            return c(key=key.encode(), target=c.CREATE, result=c.GREATER, create_revision=0)
        case ModIs(key, revision):
            return c(key=key.encode(), target=c.MOD, result=c.EQUAL, mod_revision=revision)


def op(pb: Any, op: Op) -> Any:
    match op:
        case Put(key, value, lease):
            return pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))
        case Delete(key, prefix, before):
            keys = span(key, before) if prefix else {"key": key.encode()}
            return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(**keys))
