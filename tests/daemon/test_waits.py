"""A command that follows a job which does not begin prints the reason."""

from __future__ import annotations

from msgspec.structs import replace
from support.snapshots import job, snapshot

from elastic.contract.records.job_records import JobState, Phase
from elasticd.api.routes.log_routes import WAITS_S, Waits, _incident_messages, new_messages
from elasticd.cluster.assignment import Assignment
from elasticd.cluster.published_state import Snapshot


def pending(why: str) -> Snapshot:
    return snapshot(job(state=JobState(phase=Phase.PENDING), progress=None), plan=Assignment(waiting={"train": why}))


def test_waiting_reason_is_printed_once_after_it_has_lasted() -> None:
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


def test_incident_that_ends_after_a_checkpoint_failure_is_printed() -> None:
    (exit_,) = job().incidents
    failed = replace(exit_, kind="checkpoint", detail="no space left", wall_s=991.0)
    before = _incident_messages(snapshot(job(incidents=(replace(exit_, open=True), failed))), "train")
    told = _incident_messages(snapshot(job(incidents=(exit_, failed))), "train")
    assert [note.partition(":")[0] for note in new_messages(before, told)] == ["exit on a"]
    assert new_messages(told, told) == []
    later = _incident_messages(snapshot(job(incidents=(failed, replace(failed, detail="again")))), "train")
    assert [note.partition(";")[0] for note in new_messages(told, later)] == ["checkpoint on a: again"]


def test_incident_before_the_first_generation_is_not_printed_as_given_up() -> None:
    (exit_,) = job().incidents
    late = replace(exit_, kind="late exit", world_size_before=0, world_size_after=0, timeline_s={})
    given_up = replace(exit_, world_size_after=0)
    for phase in (Phase.RUNNING, Phase.SUCCEEDED):  # the incident of the next failure tells of both
        goes_on = job(state=JobState(phase=phase), incidents=(late, given_up))
        told = _incident_messages(snapshot(goes_on), "train")
        assert [note.partition("; ")[2] for note in told] == ["before the job's first generation"]
    over = job(state=JobState(phase=Phase.FAILED), incidents=(late, given_up))
    told = _incident_messages(snapshot(over), "train")
    assert [note.partition("; ")[2] for note in told] == ["before the job's first generation", "the job was given up"]
