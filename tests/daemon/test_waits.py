"""Who follows a job that does not begin is told why."""

from __future__ import annotations

from support.pictures import job, snapshot

from elastic.core.records import JobState, Phase
from elasticd.assignment import Plan
from elasticd.board import Snapshot
from elasticd.routes import WAITS_S, Waits


def pending(why: str) -> Snapshot:
    return snapshot(job(state=JobState(phase=Phase.PENDING), progress=None), plan=Plan(waiting={"train": why}))


def test_a_reason_is_told_once_after_it_has_stood_for_a_while() -> None:
    waits = Waits("train")
    assert waits.look(pending("no slots"), 10.0) == ""
    assert waits.look(pending("no slots"), 10.0 + WAITS_S / 2) == ""
    assert waits.look(pending("no slots"), 10.0 + WAITS_S) == "train waits for: no slots"
    assert waits.look(pending("no slots"), 99.0) == ""
    assert waits.look(pending("a node"), 100.0) == "", "it may pass"
    assert waits.look(pending("a node"), 100.0 + WAITS_S) == "train waits for: a node"


def test_a_job_that_runs_or_is_not_known_waits_for_nothing() -> None:
    waits = Waits("train")
    running = snapshot(job(state=JobState(phase=Phase.RUNNING)))
    assert [waits.look(running, float(at_s)) for at_s in range(10)] == [""] * 10
    assert [Waits("other").look(pending("no slots"), float(at_s)) for at_s in range(10)] == [""] * 10
