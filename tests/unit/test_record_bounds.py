"""Numbers of a job's own records with which a daemon cannot compute: the record is malformed, as is one without a
field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from elastic.contract.records.job_records import (
    IncidentRecord,
    JobState,
    MemberRecord,
    ProgressRecord,
    Record,
    decode,
    encode,
)
from elastic.contract.records.rank_records import RanksRecord

HUGE = 10**400
INCIDENT = {"generation": 2, "kind": "exit", "node": "n1", "ranks": [1], "detail": "", "wall_s": 900.0}
PROGRESS = {"generation": 1, "world_size": 1, "step": 5, "steps_per_s": 1.0, "loss": 0.5, "wall_s": 900.0}
MEMBER = {"node": "n1", "incarnation": "x", "host": "h", "port": 1, "slots": 2}
TIMES = {"slot": 0, "rank": 0, "since_ms": 0, "until_ms": 1}
RANKS = {"node": "n1", "generation": 1, "wall_s": 900.0}


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (IncidentRecord, INCIDENT | {"wall_s": 1e306}),
        (IncidentRecord, INCIDENT | {"ended_wall_s": 1e306}),
        (IncidentRecord, INCIDENT | {"wall_s": -1e306}),
        (IncidentRecord, INCIDENT | {"timeline_s": {"stepping": 1e306}}),
        (IncidentRecord, INCIDENT | {"world_size_before": HUGE}),
        (IncidentRecord, INCIDENT | {"ranks": [HUGE]}),
        (JobState, {"since_wall_s": 1e306}),
        (MemberRecord, MEMBER | {"slots": HUGE}),
        (ProgressRecord, PROGRESS | {"step": HUGE}),
        (ProgressRecord, PROGRESS | {"steps_per_s": 1e306}),
        (ProgressRecord, PROGRESS | {"ledger": {"until_ms": 1, "wall_ms": HUGE}}),
        (ProgressRecord, PROGRESS | {"ledger": {"until_ms": 1, "ranks_ms": {"form": HUGE}}}),
        (ProgressRecord, PROGRESS | {"slow_ranks": [{"rank": 0, "node": "n1", "ratio": 1e306}]}),
        (RanksRecord, RANKS | {"ranks": [TIMES | {"open_ms": HUGE}]}),
        (RanksRecord, RANKS | {"ranks": [TIMES | {"own_s": [1e308]}]}),
    ],
)
def test_a_number_beyond_all_bounds_makes_a_record_malformed(kind: type[Record], facts: dict[str, Any]) -> None:
    raw = msgspec.json.encode(encode_ints(facts | {"protocol": Record().protocol}))
    with pytest.raises(msgspec.ValidationError, match=r"Expected `(int|float)` [<>]= .* at `\$\."):
        decode(kind, raw)


def encode_ints(value: Any) -> Any:
    """An integer of any length as JSON."""
    if isinstance(value, dict):
        return {key: encode_ints(each) for key, each in value.items()}
    if isinstance(value, list):
        return [encode_ints(each) for each in value]
    return msgspec.Raw(str(value).encode()) if value == HUGE else value


def test_what_a_script_logs_is_shown_whatever_its_size() -> None:
    told = msgspec.convert(PROGRESS | {"loss": 1e306, "logged": {"norm": -1e306}}, ProgressRecord)
    assert decode(ProgressRecord, encode(told)) == told
    assert math.isfinite(told.loss or 0.0)
