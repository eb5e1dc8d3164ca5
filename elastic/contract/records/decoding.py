"""Views of etcd as records: each value is decoded once, by agents and daemons alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .job_records import MemberRecord, Record, decode

R = TypeVar("R", bound=Record)


class Stored(Protocol):
    """One key as etcd returns it."""

    @property
    def value(self) -> bytes: ...
    @property
    def create_revision(self) -> int: ...
    @property
    def mod_revision(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Member:
    record: MemberRecord
    create_revision: int
    """Create revision of its key: the oldest member has the smallest."""

    @property
    def id(self) -> tuple[str, str]:
        return self.record.node, self.record.incarnation


class Decoder:
    """Decodes a value only when it is new. The values are compared: a revision can recur after etcd was wiped."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Record]] = {}
        self._before: dict[str, tuple[bytes, Record]] = {}

    def next_view(self) -> None:
        """Forget what the view before the last one had, and the last one had not."""
        self._before, self._known = self._known, {}

    def read(self, kind: type[R], name: str, kv: Stored, decoder: Callable[[bytes], R] | None = None) -> R:
        """`name`: the key, or another name for what is read from different keys. Raises ProtocolVersionMismatch for a
        record of another version, msgspec.DecodeError and UnicodeDecodeError for a malformed one."""
        raw = kv.value
        cached = self._known.get(name) or self._before.get(name)
        if cached is None or (cached[0] is not raw and cached[0] != raw) or not isinstance(cached[1], kind):
            cached = raw, decoder(raw) if decoder else decode(kind, raw)
        self._known[name] = cached
        record = cached[1]
        assert isinstance(record, kind)
        return record
