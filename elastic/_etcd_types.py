"""What callers and the adapter of etcd share: values, operations, compares, errors. Imported through `elastic.etcd`.

EtcdError                  something is wrong; not worth repeating as it is
├── EtcdUnavailable        no answer, or no quorum: worth repeating later
├── EtcdDenied             user, password or rights: a person must act
├── EtcdFull               etcd's space quota is used up (NOSPACE): a person must act
└── LeaseGone              the lease named in the request does not exist (any more): grant another
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KV:
    """One key as it stands in etcd. `lease` is 0 for a key that stays."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


def key_text(key: bytes) -> str:
    """A key as text. etcd takes any bytes; ours are ASCII. A foreign one that is no UTF-8 ends no watch: it is shown
    with backslashes, which can be logged and sent on, and with which two of them stay two: the watch counts keys."""
    return key.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class View:
    """Immutable picture of all keys below one prefix."""

    kvs: Mapping[str, KV]
    revision: int
    """The newest revision of etcd that the picture is known to contain."""
    connected: bool
    """Whether etcd confirmed the picture lately. False: contact is lost, the picture may be old."""
    as_of_s: float
    """Monotonic instant, on this host, at which etcd last confirmed the picture."""
    error: str = ""
    """Why contact is lost; empty while connected."""
    prefix: str = ""
    """What it is a picture of."""


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds when there is no such key."""

    key: str


@dataclass(frozen=True, slots=True)
class Present:
    """Holds when there is such a key."""

    key: str


@dataclass(frozen=True, slots=True)
class ModIs:
    """Holds when the key was last written at `revision`; 0: when there is no such key."""

    key: str
    revision: int


Op = Put | Delete
Compare = Absent | Present | ModIs


@dataclass(frozen=True, slots=True)
class TxnResult:
    ok: bool
    """Whether all compares held, and so `then` was done (else `otherwise`)."""
    revision: int
    """Revision of etcd after the transaction: the mod revision of whatever it wrote."""


class MemberHealth(NamedTuple):
    """One endpoint, as it answered for itself."""

    endpoint: str
    version: str
    ok: bool
    error: str
    database_mb: float = 0.0
    """Size of its database on disk; etcd takes no more writes beyond its quota, 2 GiB unless it is told otherwise."""


class EtcdError(Exception):
    """etcd refused a request for a reason that repeating does not change."""


class EtcdUnavailable(EtcdError):
    """No answer in time, or no quorum. Worth repeating later.

    `maybe_done` says whether a write may have taken effect all the same (or may do so yet): then read before
    repeating it.
    """

    def __init__(self, message: str, *, maybe_done: bool = True) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class EtcdDenied(EtcdError):
    """User name, password, certificate or rights do not suffice."""


class EtcdFull(EtcdError):
    """etcd's space quota is used up: it takes no writes until it is compacted, defragmented and disarmed."""


class LeaseGone(EtcdError):
    """The lease named in the request has expired or was revoked."""
