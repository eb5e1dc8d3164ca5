"""What is told of an incident of a large job with many failures is still a record that etcd takes."""

from __future__ import annotations

from elastic.contract.records.incident_account import Outcome
from elastic.contract.records.incident_fold import KEPT_CAUSES, incidents
from elastic.contract.records.job_records import BrokenRecord, Cause, GenerationRecord, Loss, encode
from elastic.contract.records.report_size import REPORT_BYTES, fitted
from elastic.recovery.facts.incident import AccountFacts, Incident, account

LONG = "é" * 500
"""As long as an error's message may be."""
NODES = 1000


def broken(generation: int) -> BrokenRecord:
    also = [Loss(node=f"n{i}", kind="exit", detail=LONG, slots=(0,), ranks=(i,)) for i in range(64)]
    return BrokenRecord(
        generation=generation, node="first", kind="exit", detail=LONG, slots=(0,), ranks=(0,), also=tuple(also),
        stacks={"slot 0 (hung)": "s" * 6000},
    )  # fmt: skip


def test_incident_of_a_thousand_nodes_and_fifty_generations_fits_in_one_record() -> None:
    formed = GenerationRecord(number=1, store_host="h", store_port=1, leader="l", why="", nodes=())
    gone = tuple(
        Cause(generation=1, node=f"n{i}", kind="lost", ranks=(i,), detail="node is gone: its agent's lease has run out")
        for i in range(NODES)
    )
    incident = Incident(first=1, generations=(formed,), began_s=0.0, gone=gone)
    told = account(AccountFacts(incident, formed, Outcome.OPEN, (0, 0), True), node="a", by="a.1")
    assert fitted(told) == told
    (record,) = incidents((told,), map(broken, range(1, 51)))
    assert len(encode(fitted(record))) < REPORT_BYTES
    assert len(record.causes) == KEPT_CAUSES
    assert record.causes[0].node == "first"
    assert f"and {NODES + 50 * 65 - 1} more" in record.text


def test_an_account_that_is_cut_is_not_certain_of_what_no_agent_has_reported() -> None:
    formed = GenerationRecord(number=1, store_host="h", store_port=1, leader="l", why="", nodes=())
    gone = tuple(Cause(generation=1, node=f"n{i}", kind="lost", ranks=(i,), detail=LONG) for i in range(NODES))
    incident = Incident(first=1, generations=(formed,), began_s=0.0, gone=gone)
    told = fitted(account(AccountFacts(incident, formed, Outcome.OPEN, (0, 0), True), node="a", by="a.1"))
    assert told.absent is None
    assert len(encode(told)) <= REPORT_BYTES
