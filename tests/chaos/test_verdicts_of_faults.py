"""Each fault that the chaos tests inject gets the right class, from what is recorded of it. Pure: the runs with real
faults compare the same table (`random_faults.check_told`)."""

from __future__ import annotations

import msgspec
import pytest
from chaos.random_faults import ANYWHERE, CLASSES, ON_A_NETWORK, ONE_INCIDENT, PERHAPS

from elastic.contract.records.job_records import IncidentRecord
from elastic.contract.records.reasons import Code, Text, reason
from elasticd.diagnosis.verdict import judge

STOPPED = ["process is stopped (state T) and silent for 2.1 s", "no progress for 4.0 s while computing at step 9; …"]
RECORDED = {
    "exit": {
        "worker SIGKILL": ["killed by SIGKILL", "killed by SIGKILL: OSError: from an earlier line of the log"],
        "two workers SIGKILL": ["killed by SIGKILL (and 1 more)"],
        "zygote and worker SIGKILL": ["killed by SIGKILL"],
        "worker SIGSEGV": ["killed by SIGSEGV", "killed by SIGSEGV: Fatal Python error: Segmentation fault"],
    },
    "hang": {"worker SIGSTOP": STOPPED, "node frozen for up to 6 s": STOPPED},
}
LOST = [reason(code, node="n1") for code in (Code.PORT_REFUSES, Code.LEASE_EXPIRED, Code.AGENT_RESTARTED)]
UNREACHABLE = [reason(Code.UNREACHED, node="n1", others="n0, n2")]
FAULTS = {**ONE_INCIDENT, **PERHAPS}
CASES = [
    (fault, kind, detail)
    for fault, kinds in FAULTS.items()
    for kind in kinds
    for detail in RECORDED.get(kind, {}).get(fault) or {"lost": LOST, "unreachable": UNREACHABLE}[kind]
]


@pytest.mark.parametrize(("fault", "kind", "detail"), CASES)
def test_injected_fault_gets_its_class(fault: str, kind: str, detail: Text) -> None:
    base = {"generation": 2, "node": "n1", "ranks": (1,), "wall_s": 9.0, "kind": kind, "detail": detail, "step": 40}
    verdict = judge(msgspec.convert(base, IncidentRecord))
    assert str(verdict.cls) in CLASSES[fault]
    assert not verdict.person


def test_every_fault_that_ends_a_generation_has_its_classes() -> None:
    assert set(CLASSES) == set(FAULTS)
    assert set(CLASSES) <= {*ANYWHERE, *ON_A_NETWORK}
