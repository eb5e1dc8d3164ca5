"""Records as an agent writes them to etcd: with any text that a script has left, and in a size that etcd takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.job_records import BrokenRecord, IncidentRecord, Record, SpecRecord, decode
from elastic.contract.records.job_records import encode as _strictly
from elastic.contract.records.report_size import fitted
from elastic.etcd.client import Compare, Etcd, ModIs, Op, Put, TxnResult
from elastic.etcd.types import EtcdForged

R = TypeVar("R", bound=Record)

log = structlog.get_logger()


def encode(record: Record) -> bytes:
    return _strictly(readable(record))


def readable(record: R) -> R:
    """A script's error may contain text that UTF-8 cannot encode, such as a file name in another encoding. Such a
    failure must be written all the same, or the job would fail in this way again and again."""
    try:
        _strictly(record)
    except UnicodeEncodeError:
        return msgspec.convert(_readable(msgspec.to_builtins(record)), type(record))
    return record


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
    record: BrokenRecord | IncidentRecord | IncidentAccount,
    also: Sequence[Op] = (),
    otherwise: Sequence[Op] = (),
) -> TxnResult:
    """Write a failure report, or what is told of an incident, if `compares` hold, in a size that etcd takes: a failure
    that is not reported breaks no generation, and an incident that is not told is never over."""
    return etcd.txn(compares, [Put(key, _strictly(fitted(readable(record)))), *also], otherwise)


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
