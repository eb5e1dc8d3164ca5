"""Each fault that the chaos tests inject gets the right class, from what is recorded of it. Pure: the runs with real
faults compare the same table (`random_faults.check_told`)."""

from __future__ import annotations

import msgspec
import pytest
from chaos.random_faults import ANYWHERE, CLASSES, ON_A_NETWORK, ONE_INCIDENT, PERHAPS

from elastic.contract.records.job_records import IncidentRecord
from elastic.contract.records.reasons import Code, Text, reason
from elasticd.diagnosis.verdict import judge

STOPPED = [reason(Code.STOPPED, reason(Code.SILENT, for_s=2.1)), reason(Code.NO_PROGRESS, doing="computing", step=9)]
RECORDED = {
    "exit": {
        "worker SIGKILL": [reason(Code.KILLED, signal="SIGKILL")],
        "two workers SIGKILL": [reason(Code.KILLED, signal="SIGKILL")],
        "zygote and worker SIGKILL": [reason(Code.KILLED, signal="SIGKILL")],
        "worker SIGSEGV": [reason(Code.KILLED, signal="SIGSEGV")],
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
