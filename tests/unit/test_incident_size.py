"""An incident of a large job with many failures is still a record that etcd takes."""

from __future__ import annotations

from elastic.contract.records.job_records import BrokenRecord, Cause, GenerationRecord, Loss, encode
from elastic.recovery.facts.incident import KEPT_CAUSES, Incident, open_record

ETCD_BYTES = 1.5 * 2**20
"""etcd's --max-request-bytes, unless it is told otherwise."""
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
    world_size = GenerationRecord(number=1, store_host="h", store_port=1, leader="l", why="", nodes=())
    gone = [Cause(generation=1, node=f"n{i}", kind="lost", ranks=(i,), detail=LONG) for i in range(NODES)]
    reports = tuple(map(broken, range(1, 51)))
    record = open_record(
        Incident(key=2, generations=(world_size,), began_s=0.0, reports=reports, gone=tuple(gone)), counted=True
    )
    assert len(encode(record)) < ETCD_BYTES
    assert len(record.causes) == KEPT_CAUSES
    assert record.causes[0].node == "first"
    assert f"and {NODES + 50 * 65 - 1} more" in record.text
