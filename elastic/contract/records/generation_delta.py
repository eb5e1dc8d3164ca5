"""A large generation in etcd: how its nodes differ from those of an earlier one, the base. Pure.

After a failure a thousand agents read the next generation at the same moment, and almost nothing in it has changed. So
its record has the changes alone. The base is an earlier generation that the readers have; for those that have not, its
nodes are in a record of their own, which is written along with the first changes since them and which few have to read.
A digest of the nodes' text binds the two. A generation without changes has all of its nodes, as in every small job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from .job_records import (
    PROTOCOL,
    BaseRecord,
    Changes,
    GenerationDelta,
    GenerationHead,
    GenerationNode,
    GenerationRecord,
    Record,
    Splice,
    decode,
)

FEW = 1 / 32
"""So many of the nodes may have changed since the base: at each further change every agent is sent them again."""


class _Unread(GenerationHead, frozen=True, kw_only=True):
    nodes: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    changes: Changes | None = None


class _UnreadBase(Record, frozen=True, kw_only=True):
    nodes: msgspec.Raw


_UNREAD = msgspec.json.Decoder(_Unread)
_UNREAD_BASE = msgspec.json.Decoder(_UnreadBase)
_NODES = msgspec.json.Decoder(tuple[GenerationNode, ...])
_HEAD = GenerationHead.__struct_fields__
digest = xxhash.xxh3_64_hexdigest


class BaseMissing(msgspec.ValidationError):
    """The nodes since which a generation tells its changes are not known here."""


class Base(NamedTuple):
    """The generation since which a later one tells its changes; itself if it has told none."""

    digest: str
    generation: GenerationRecord


class GenerationReader:
    """Decodes one generation record after another; equal bytes give the same object."""

    def __init__(self) -> None:
        self._raw = b""
        self._record: GenerationRecord | None = None
        self.base: Base | None = None
        """Of the last one; None before the first."""
        self._digest: tuple[bytes | None, str] = (None, "")

    def read(self, raw: bytes, base: bytes | None = None) -> GenerationRecord:
        """`base`: the job's BaseRecord as encoded, if it is known.

        Raises ProtocolVersionMismatch, or msgspec.ValidationError for a malformed record: BaseMissing among them."""
        if self._record is None or raw != self._raw:
            self._record, self.base = self._read(raw, base)
            self._raw = raw
        return self._record

    def _read(self, raw: bytes, base: bytes | None) -> tuple[GenerationRecord, Base]:
        try:
            unread = _UNREAD.decode(raw)
            nodes, changes = unread.nodes, unread.changes
            if unread.protocol == PROTOCOL and isinstance(nodes, msgspec.Raw):
                record = GenerationRecord(nodes=_NODES.decode(nodes), **_head(unread))
                return record, Base(digest(nodes), record)
            if unread.protocol == PROTOCOL and changes is not None:
                since = self._with_nodes(changes.since) or _of_base(unread, changes.since, base)
                record = GenerationRecord(nodes=spliced(since.nodes, changes.splices), **_head(unread))
                _carry_over(since, record, changes.splices)
                return record, Base(changes.since, since)
        except BaseMissing:
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        decode(GenerationRecord, raw)  # raises the right error
        raise msgspec.ValidationError("GenerationRecord: it cannot be read")

    def is_base(self, base: bytes) -> bool:
        """Whether this BaseRecord has the nodes of the last generation's base."""
        if base is not self._digest[0]:
            self._digest = base, digest(_nodes(base))
        return self.base is not None and self.base.digest == self._digest[1]

    def _with_nodes(self, since: str) -> GenerationRecord | None:
        """The generation with the nodes of this digest, if it was read before."""
        if self.base is not None and self.base.digest == since:
            return self.base.generation
        newest = self._record
        return newest if newest is not None and digest(msgspec.json.encode(newest.nodes)) == since else None


def _head(record: GenerationHead) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _HEAD}


def _of_base(head: GenerationHead, since: str, base: bytes | None) -> GenerationRecord:
    """Raises BaseMissing if the base has other nodes."""
    if base is None:
        raise BaseMissing("it tells its changes since nodes that are not known here")
    if digest(_nodes(base)) != since:
        raise BaseMissing("it tells its changes since other nodes than those of the base")
    return GenerationRecord(nodes=_NODES.decode(_nodes(base)), **_head(head))


def _nodes(base: bytes) -> msgspec.Raw:
    """As encoded; of a malformed base none."""
    try:
        return _UNREAD_BASE.decode(base).nodes
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw()


class Written(NamedTuple):
    """What is written to etcd for a generation."""

    generation: GenerationRecord | GenerationDelta
    base: BaseRecord | None = None
    """None: the one that is there stays."""


def written(record: GenerationRecord, before: GenerationRecord | None, base: Base | None, is_there: bool) -> Written:
    """Of a large generation. `base`: that of `before`, which it follows; `is_there`: whether etcd has it. If too much
    has changed since, the nodes of `before`, which everyone has, take its place; or its own, if it has all of them."""
    if before is None or base is None:
        return Written(record, BaseRecord(nodes=record.nodes))
    since = base.generation
    told = changes(since.nodes, record.nodes)
    if told is None or sum(1 + len(splice.nodes) for splice in told.splices) > 1 + FEW * len(record.nodes):
        since, is_there = before, False
        told = changes(before.nodes, record.nodes)
    if told is None:
        return Written(record, BaseRecord(nodes=record.nodes))
    delta = GenerationDelta(changes=told, **_head(record))
    return Written(delta, None if is_there else BaseRecord(nodes=since.nodes))


def changes(before: tuple[GenerationNode, ...], after: tuple[GenerationNode, ...]) -> Changes | None:
    """The changes from one to the other; None if there are so many that decoding all costs no more."""
    old = {place: i for i, place in enumerate(before)}
    splices: list[Splice] = []
    new: list[GenerationNode] = []
    at = 0
    """The earlier nodes up to here are handled."""
    for place in after:
        at_before = old.get(place, -1)
        if at_before < at:
            new.append(place)
            continue
        if at_before > at or new:
            splices.append(Splice(at, at_before, tuple(new)))
        at, new = at_before + 1, []
    if at < len(before) or new:
        splices.append(Splice(at, len(before), tuple(new)))
    if 2 * sum(1 + len(splice.nodes) for splice in splices) > len(after):
        return None
    return Changes(since=digest(msgspec.json.encode(before)), splices=tuple(splices))


def spliced(places: tuple[GenerationNode, ...], splices: Sequence[Splice]) -> tuple[GenerationNode, ...]:
    """Raises msgspec.ValidationError unless they are in order: a job's user can write any, and a few that overlap would
    make a list that no daemon has memory for."""
    nodes: list[GenerationNode] = []
    at = 0
    for splice in splices:
        if not at <= splice.start <= splice.stop <= len(places):
            raise msgspec.ValidationError("GenerationDelta: its changes overlap, or are of nodes that the base has not")
        nodes += places[at : splice.start]
        nodes += splice.nodes
        at = splice.stop
    return (*nodes, *places[at:])


def _carry_over(earlier: GenerationRecord, record: GenerationRecord, splices: Sequence[Splice]) -> None:
    """Copy the cached lookups of `earlier` to `record`, with the ranks after each splice shifted."""
    moves = []
    for start, stop, new in (msgspec.structs.astuple(splice) for splice in splices):
        moves.append((start, stop, len(new) - (stop - start), _workers(new) - _workers(earlier.nodes[start:stop])))
    record.__dict__["world_size"] = earlier.world_size + sum(workers for *_, workers in moves)
    nodes, firsts = record.asked
    for node, at in earlier.asked[0].items():
        if at is None or any(start <= at < stop for start, stop, _, _ in moves):
            continue
        before = [move for move in moves if move[1] <= at]
        nodes[node] = at + sum(places for _, _, places, _ in before)
        if node in earlier.asked[1]:
            firsts[node] = earlier.asked[1][node] + sum(workers for *_, workers in before)


def _workers(places: Sequence[GenerationNode]) -> int:
    return sum(len(place.slots) for place in places)
