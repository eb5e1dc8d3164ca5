"""Records as an agent writes them to etcd: with any text that a script has left, and in a size that etcd takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from ..contract.records import BrokenRecord, IncidentRecord, Record, SpecRecord, WorkerError, decode
from ..contract.records import encode as _strictly
from ..etcd.client import Compare, Etcd, ModIs, Op, Put, TxnResult
from ..etcd.types import EtcdForged, EtcdRefused

SHORT_TEXT = 1000
"""Characters of a text in a record that etcd has refused."""

log = structlog.get_logger()


def encode(record: Record) -> bytes:
    """A script's error may contain text that UTF-8 cannot encode, such as a file name in another encoding. Such a
    failure must be written all the same, or the job would fail in this way again and again."""
    try:
        return _strictly(record)
    except UnicodeEncodeError:
        return _strictly(msgspec.convert(_readable(msgspec.to_builtins(record)), type(record)))


def _readable(value: Any) -> Any:
    """Plain data with characters that UTF-8 cannot encode replaced by escape sequences."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_readable(key): _readable(item) for key, item in value.items()}
        case list() | tuple():
            return [_readable(item) for item in value]
    return value


def put_report(
    etcd: Etcd,
    compares: Sequence[Compare],
    key: str,
    record: BrokenRecord | IncidentRecord,
    also: Sequence[Op] = (),
    otherwise: Sequence[Op] = (),
) -> TxnResult:
    """Write a failure report or an incident, if `compares` hold; without its long texts if etcd refuses it with them:
    a failure that is not reported breaks no generation, and an incident that is not written is never closed."""
    try:
        return etcd.txn(compares, [Put(key, encode(record)), *also], otherwise)
    except EtcdRefused as error:
        log.error("etcd.record_shortened", key=key, error=str(error))
        return etcd.txn(compares, [Put(key, encode(shortened(record))), *also], otherwise)


def no_other_submission(etcd: Etcd, spec_key: str, ours: SpecRecord, key: str) -> ModIs | None:
    """Holds as long as no other job has taken the name of `ours`, whose spec may be gone (revision 0); None: one has,
    and `key` is not to be written."""
    try:
        kv = etcd.get(spec_key)
        same = kv is None or decode(SpecRecord, kv.value).submission == ours.submission
    except EtcdForged:  # signed for another submission
        kv, same = None, False
    if not same:
        log.warning("etcd.not_written", key=key, why="another job has taken the name")
        return None
    return ModIs(spec_key, kv.mod_revision if kv else 0)


def shortened(record: BrokenRecord | IncidentRecord) -> BrokenRecord | IncidentRecord:
    """Without stacks and log lines, and with the beginning of its other texts."""
    short = msgspec.structs.replace(
        record, detail=record.detail[:SHORT_TEXT], error=_short(record.error), stacks={}, last_lines=()
    )
    if isinstance(short, BrokenRecord):
        also = (msgspec.structs.replace(loss, detail=loss.detail[:SHORT_TEXT]) for loss in short.also)
        return msgspec.structs.replace(short, also=tuple(also))
    causes = (msgspec.structs.replace(cause, detail=cause.detail[:SHORT_TEXT]) for cause in short.causes)
    return msgspec.structs.replace(short, causes=tuple(causes))


def _short(error: WorkerError | None) -> WorkerError | None:
    if error is None:
        return None
    return msgspec.structs.replace(error, message=error.message[:SHORT_TEXT], traceback="", last_lines=())
