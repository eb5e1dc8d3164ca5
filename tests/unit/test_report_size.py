"""A failure report and an incident of any content are read, written and shown within REPORT_BYTES."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import BrokenRecord, Cause, IncidentRecord, Loss, WorkerError, encode
from elastic.contract.records.reasons import Code, Reason
from elastic.contract.records.report_size import REPORT_BYTES, fitted, reader
from elasticd.cluster.cluster import KEPT_INCIDENTS, ClusterReader

LONG = "\0" * 40_000
MANY = tuple(range(10**9, 10**9 + 30_000))
ERROR = WorkerError(node="n", slot=0, rank=0, message=LONG, traceback=LONG, last_lines=(LONG,) * 9)


def incident(**facts: object) -> IncidentRecord:
    return IncidentRecord(**({"generation": 2, "kind": "exit", "node": "n", "ranks": (0,), "detail": "d", "wall_s": 1.0}
                             | facts))  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        incident(detail=LONG), incident(node=LONG, kind=LONG, restored_from=LONG), incident(ranks=MANY),
        incident(timeline_s={f"{LONG[:99]}{i}": 1.0 for i in range(9999)}), incident(error=ERROR),
        incident(stacks={f"{i}": LONG[:9999] for i in range(99)}), incident(last_lines=(LONG,) * 3),
        incident(causes=(Cause(generation=1, node=LONG[:999], kind="exit", ranks=MANY[:99], detail=LONG[:999]),) * 999),
        BrokenRecord(generation=1, node="n", kind="exit", detail=LONG, slots=MANY, ranks=MANY, error=ERROR,
                     also=(Loss(node=LONG, kind=LONG, detail=LONG, slots=MANY, ranks=MANY),) * 40),
    ],
    ids=lambda record: max(msgspec.structs.asdict(record).items(), key=lambda item: len(str(item[1])))[0],
)  # fmt: skip
def test_a_report_of_any_content_fits_and_says_what_it_had(record: IncidentRecord | BrokenRecord) -> None:
    short = fitted(record)
    assert len(encode(short)) <= REPORT_BYTES < len(encode(record))
    assert isinstance(short.detail, Reason)
    assert (short.detail.code, short.detail.values) == (Code.CUT, {"nbytes": len(encode(record))})
    assert (short.generation, short.kind[:4]) == (record.generation, record.kind[:4])


def test_a_report_that_fits_is_left_as_it_is() -> None:
    record = incident(stacks={f"rank {i}": "s" * 6000 for i in range(8)})
    assert fitted(record) is record
    assert reader(IncidentRecord)(encode(record)) == record


def test_stacks_of_a_large_node_are_cut_and_not_dropped() -> None:
    stacks = fitted(incident(stacks={f"rank {i}": f"begin {'s' * 30_000} end" for i in range(16)})).stacks
    assert len(stacks) == 16
    assert all(stack.startswith("begin") and stack.endswith("end") for stack in stacks.values())


@dataclass(frozen=True)
class Key:
    key: str
    value: bytes
    create_revision: int = 1
    mod_revision: int = 1


def test_a_daemon_shows_incidents_within_bounds_whatever_a_jobs_user_has_written() -> None:
    keys = ClusterKeys("c")
    large, small = encode(incident(detail="x" * 1_000_000)), encode(incident())
    paths = [keys.job("job").incident(number) for number in range(1, KEPT_INCIDENTS + 100)]
    job = ClusterReader(keys).read({p: Key(p, large if p is paths[-1] else small) for p in paths}, 5).jobs["job"]
    assert len(job.incidents) == KEPT_INCIDENTS
    assert max(len(encode(found)) for found in job.incidents) <= REPORT_BYTES
