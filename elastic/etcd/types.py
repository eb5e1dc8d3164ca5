"""Types shared by callers and the etcd client: values, operations, compares, errors. Import them from `.client`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec


class KV(msgspec.Struct, frozen=True):
    """A key in etcd. `lease` is 0 for a key without one."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int
    stamp: int = 0
    """Of its signature, in nanoseconds since 1970 or a little more; 0: signatures are not checked."""


def key_text(key: bytes) -> str:
    """A key as text. etcd accepts any bytes; ours are ASCII. A foreign key that is not UTF-8 must not end a watch: it
    is shown with backslash escapes, which can be logged and sent on, and which keep different keys different (the watch
    counts keys)."""
    return key.decode(errors="backslashreplace")


class Refusal(msgspec.Struct, frozen=True):
    """A key whose record is not used, because its signature is missing or not valid."""

    kv: KV
    """As it is in etcd."""
    why: str
    in_place_of_newer: bool = False
    """A genuine and newer one was read before, which still counts: it stays among the view's keys."""


@dataclass(frozen=True, slots=True)
class View:
    """Immutable view of all keys below one prefix."""

    kvs: Mapping[str, KV]
    revision: int
    """Newest revision of etcd that the view is known to contain."""
    connected: bool
    """Whether etcd confirmed the view lately. False: contact is lost, the view may be out of date."""
    as_of_s: float
    """Monotonic time, on this host, at which etcd last confirmed the view."""
    error: str = ""
    """Why contact is lost; empty while connected."""
    prefix: str = ""
    """The watched prefix."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """Keys whose records are not used; they are not among `kvs`, unless an earlier record of the key still counts."""


class Put(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True):
    key: str
    prefix: bool = False
    """All keys that begin with `key`."""
    before: str = ""
    """With `prefix`: of these the ones that sort before this key."""


class Absent(msgspec.Struct, frozen=True):
    """Holds if the key does not exist."""

    key: str


class Present(msgspec.Struct, frozen=True):
    """Holds if the key exists."""

    key: str


class ModIs(msgspec.Struct, frozen=True):
    """Holds if the key was last written at `revision`; 0: if it does not exist."""

    key: str
    revision: int


Op = Put | Delete
Compare = Absent | Present | ModIs


class TxnResult(msgspec.Struct, frozen=True):
    ok: bool
    """Whether all compares held, so that `then` was applied (else `otherwise`)."""
    revision: int
    """Revision of etcd after the transaction: the mod revision of the keys it wrote."""


class MemberHealth(NamedTuple):
    """Status of one endpoint, as reported by itself."""

    endpoint: str
    version: str
    ok: bool
    error: str
    database_mb: float = 0.0
    """Size of its database on disk; etcd accepts no writes beyond its quota, 2 GiB by default."""


class EtcdError(Exception):
    """A request failed, and repeating it unchanged does not help."""


class EtcdUnavailable(EtcdError):
    """No answer in time, or no quorum. Worth retrying later.

    `maybe_done`: whether a write may have taken effect, or may do so yet; if so, read before repeating it.
    """

    def __init__(self, message: str, *, maybe_done: bool = True) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class EtcdDenied(EtcdError):
    """User name, password, certificate or permissions are insufficient: needs an operator."""


class EtcdForged(EtcdError):
    """A record has no valid signature of the cluster key, and is not used; see `elastic.etcd.signing`."""

    def __init__(self, kv: KV, why: str, older: bool | None = None) -> None:
        """`older`: whether a newer record counts on in its place; None: if one is known."""
        super().__init__(f"{kv.key}: {why}")
        self.kv = kv
        self.why = why
        self.older = older


class EtcdRefused(EtcdError):
    """etcd will never do this request: it is too large, or not valid."""


class EtcdFull(EtcdError):
    """etcd's space quota is used up (NOSPACE): it accepts no writes until an operator has compacted, defragmented and
    disarmed it."""


class LeaseGone(EtcdError):
    """The lease named in the request has expired or was revoked: grant another."""
