"""What is drawn up of an incident: a record that etcd takes however large the job is, with the steps that were lost."""

from __future__ import annotations

from elastic.core.incident import KEPT_CAUSES, Incident, closed, drawn
from elastic.core.records import BrokenRecord, Cause, GenerationRecord, Loss, Place, encode

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


def test_a_thousand_nodes_and_fifty_generations_are_one_record() -> None:
    world = GenerationRecord(number=1, store_host="h", store_port=1, leader="l", why="", places=())
    gone = [Cause(generation=1, node=f"n{i}", kind="lost", ranks=(i,), detail=LONG) for i in range(NODES)]
    reports = tuple(map(broken, range(1, 51)))
    record = drawn(Incident(key=2, worlds=(world,), began_s=0.0, reports=reports, gone=tuple(gone)), counted=True)
    assert len(encode(record)) < ETCD_BYTES
    assert len(record.causes) == KEPT_CAUSES
    assert record.causes[0].node == "first"
    assert f"and {NODES + 50 * 65 - 1} more" in record.detail


def test_a_generation_that_waited_and_goes_on_has_lost_no_step() -> None:
    """Two nodes did not reach each other, too few could go on without the other, and then they met again."""
    place = Place(node="n1", host="h", incarnation="n1.1", slots=(0,))
    world = GenerationRecord(number=1, store_host="h", store_port=1, leader="l", why="", places=(place,))
    gone = (Cause(generation=1, node="n1", kind="unreachable", ranks=(1,)),)
    record = closed(Incident(key=2, worlds=(world,), began_s=0.0, gone=gone), world, recovered=True, counted=True)
    assert (record.kind, record.steps_lost, record.steps_lost_at_most) == ("unreachable", 0, 0)
