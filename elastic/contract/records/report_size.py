"""Failure reports and incidents in a bounded size. Their texts are a script's, and a job's user can write any. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from elastic.contract.texts import cut_middle

from .incident_account import IncidentAccount
from .job_records import BrokenRecord, IncidentRecord, decode, encode
from .reasons import Code, reason

REPORT_BYTES = 128 * 1024
"""Most that such a record has in etcd, and in what the daemon shows of it."""
_STEPS = ((4000, 400), (1000, 100), (200, 50), (50, 30))
"""(characters of a text, entries of a list) to cut to, in turn, until the record fits: it does with the last."""

R = TypeVar("R", bound=BrokenRecord | IncidentRecord | IncidentAccount)


def fitted(record: R) -> R:
    """`record`, with its texts and lists cut as far as REPORT_BYTES needs; its `detail` then says so, if it has one."""
    whole_bytes = len(encode(record))
    if whole_bytes <= REPORT_BYTES:
        return record
    plain, cut = msgspec.to_builtins(record), record
    for chars, entries in _STEPS:
        cut = msgspec.convert(_cut(plain, chars, entries), type(record))
        if isinstance(cut, IncidentAccount):
            cut = msgspec.structs.replace(cut, absent=None)
        else:
            cut = msgspec.structs.replace(cut, detail=reason(Code.CUT, cut.detail, nbytes=whole_bytes))
        if len(encode(cut)) <= REPORT_BYTES:
            break
    return cut


def reader(kind: type[R]) -> Callable[[bytes], R]:
    """Reads such records in a bounded size. It raises as `decode`."""

    def read(raw: bytes) -> R:
        record = decode(kind, raw)
        return fitted(record) if len(raw) > REPORT_BYTES else record

    return read


def _cut(value: Any, chars: int, entries: int) -> Any:
    match value:
        case str():
            return cut_middle(value, chars)
        case dict():
            # A record's own fields are fewer than the fewest entries.
            return {_cut(k, chars, 0): _cut(item, chars, entries) for k, item in list(value.items())[:entries]}
        case list() | tuple():
            return [_cut(item, chars, entries) for item in value[:entries]]
    return value
