"""What a node publishes of its agents that are not at work yet."""

from __future__ import annotations

import sys

import msgspec
import pytest

from elastic.contract.agent_files import AgentStatus
from elastic.contract.records.reasons import Code, Reason, Text, reason
from elasticd.cluster.reconcile import agent_rows, worker_rows


def status(**facts: object) -> AgentStatus:
    base = {"pid": 1, "incarnation": "i", "job": "j", "node": "a", "phase": "forming", "reason": "", "leader": False}
    return msgspec.convert(base | {"generation": 0, "etcd_ok": True, "written_wall_s": 9.0} | facts, AgentStatus)


@pytest.mark.parametrize(
    ("known", "rows"),
    [
        (None, [(reason(Code.AGENT_STARTS), 500.0)]),
        (status(phase="joining", etcd_ok=False, reason="etcd does not answer: refused"),
         [(reason(Code.AGENT_WAITS, "etcd does not answer: refused"), 500.0)]),
        (status(doing=reason(Code.FORMS, number=3), doing_since_wall_s=507.5), [(reason(Code.FORMS, number=3), 507.5)]),
        (status(phase="running"), []),
    ],
)  # fmt: skip
def test_agent_rows(known: AgentStatus | None, rows: list[tuple[Reason, float]]) -> None:
    assert [(row.doing, row.since_wall_s) for row in agent_rows({"j": (known, 500.04)})] == rows


def test_whatever_a_user_writes_fits_into_the_record_of_the_node() -> None:
    row = {"rank": 0, "node": "a", "slot": 0, "pid": 7, "phase": "running", "step": 0, "incarnation": 0}
    hostile = status(doing="x" * 3_000_000, ranks=[row | {"pid": 2**63 - 1}, *[row] * 50_000])
    because = reason(Code.FORMS, "x" * 3_000_000)
    deep: Text = ""
    for _ in range(sys.getrecursionlimit()):
        deep = reason(Code.LISTED, deep or "x")
    waits = status(phase="joining", etcd_ok=False, reason="x" * 3_000_000)
    assert len(msgspec.json.encode(worker_rows({"j": hostile}))) < 10_000
    assert len(msgspec.json.encode(agent_rows({"j": (hostile, 0.0), "k": (waits, 0.0)}))) < 1_000
    for text in (because, deep):
        long = msgspec.structs.replace(hostile, doing=text)
        assert len(msgspec.json.encode(agent_rows({"j": (long, 0.0)}))) < 500
    assert [row.pid for row in worker_rows({"j": status(ranks=[row])})] == [7]
