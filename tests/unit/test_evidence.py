"""Which of several reports of one failure names the cause."""

from __future__ import annotations

import functools
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.records.incident_account import weight
from elastic.contract.records.job_records import BrokenRecord, WorkerError
from elastic.recovery.facts.evidence import KEPT_LOSSES, merged


def report(node: str, *slots: int, kind: str = "exit", rollback: bool = False) -> BrokenRecord:
    ranks = tuple(10 * ord(node[0]) + slot for slot in slots)
    return BrokenRecord(generation=1, node=node, kind=kind, detail=kind, slots=slots, ranks=ranks, rollback=rollback)


def test_a_death_takes_the_place_of_a_failed_collective() -> None:
    record = merged(report("a", kind="comm"), report("b", 0))
    assert (record.kind, record.node, record.also) == ("exit", "b", ())


def test_a_failed_collective_adds_nothing_to_a_death() -> None:
    assert merged(report("b", 0), report("a", kind="comm")) == report("b", 0)


@pytest.mark.parametrize("kind", ["comm", "idle", "respawn"])
def test_a_consequence_never_names_the_cause(kind: str) -> None:
    assert weight(kind) < weight("drain") < weight("exit") == weight("hang")


def test_merged_report_counts_a_worker_that_did_not_abort_as_lost() -> None:
    record = merged(report("a", 0, kind="respawn"), report("b", 1))
    assert (record.node, record.lost("a"), record.lost("b")) == ("b", {0}, {1})


def test_a_death_takes_the_place_of_a_rank_that_found_no_state() -> None:
    """It follows from what had happened before; the budget is charged for the death."""
    lacking = msgspec.structs.replace(
        report("a", 0), error=WorkerError(node="a", slot=0, rank=0, message="NoStateError", no_state=True)
    )
    for record in (merged(lacking, report("b", 0)), merged(report("b", 0), lacking)):
        assert (record.node, record.fingerprint) == ("b", "")
        assert [(loss.node, loss.kind) for loss in record.also] == [("a", "no-state")]
    for record in (merged(lacking, report("b", kind="comm")), merged(report("b", kind="comm"), lacking)):
        assert record.node == "a", "it says why, and the failed collective does not"


def test_a_bad_loss_of_an_earlier_step_is_the_cause_of_those_after_it() -> None:
    """Its gradients spoil the weights of all ranks. Which rank reports first is chance."""
    earlier = msgspec.structs.replace(report("b", 0, kind="bad loss"), step=13)
    later = msgspec.structs.replace(report("a", 0, kind="bad loss"), step=14)
    for record in (merged(earlier, later), merged(later, earlier)):
        assert (record.node, record.step, [loss.node for loss in record.also]) == ("b", 13, ["a"])
    drift = msgspec.structs.replace(earlier, kind="drift")
    assert merged(later, drift).node == "a", "another kind of failure"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_rank_with_bad_numbers_stays_in_the_report_whichever_comes_first(order: tuple[int, ...]) -> None:
    """They lose no slot. All are on one node, and the rank with the earliest step may report last."""
    reports = [
        BrokenRecord(generation=1, node="a", kind="bad loss", detail="nan", ranks=(rank,), step=13 if rank else 12)
        for rank in range(3)
    ]
    first, *others = (reports[i] for i in order)
    record = functools.reduce(merged, others, first)
    assert (record.ranks, record.step) == ((0,), 12)
    assert sorted(loss.ranks for loss in record.also) == [(1,), (2,)]


def test_merged_report_keeps_rollback_in_any_report_order() -> None:
    assert merged(report("a", 0), report("b", kind="nan", rollback=True)).rollback
    assert merged(report("b", kind="nan", rollback=True), report("a", 0)).rollback


def test_not_more_are_kept_than_fit_a_record() -> None:
    record = report("a", 0)
    for slot in range(1, KEPT_LOSSES + 20):
        record = merged(record, report("a", slot))
    assert len(record.also) == KEPT_LOSSES


REPORTS = st.lists(
    st.builds(
        report, st.sampled_from("abc"), st.integers(0, 2), kind=st.sampled_from(["exit", "hang", "comm", "respawn"])
    ),
    min_size=1,
    max_size=5,
)


@given(REPORTS)
def test_each_order_of_reports_tells_the_same_losses_and_none_twice(reports: list[BrokenRecord]) -> None:
    found = set()
    for order in itertools.islice(itertools.permutations(reports), 24):
        record = order[0]
        for more in (*order[1:], *order):
            record = merged(record, more)
        losses = [(record.node, s) for s in record.slots] + [(x.node, s) for x in record.also for s in x.slots]
        assert len(losses) == len(set(losses))
        found.add((weight(record.kind), frozenset(losses)))
    assert len(found) == 1
