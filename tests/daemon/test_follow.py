"""What `elasticctl run` shows while a job trains, and its last line."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from support import plain_views
from support.snapshots import job, progress, snapshot

from elastic.contract.origin import Origin
from elastic.contract.records.job_records import JobState, Phase
from elasticd.api.routes.log_routes import PROGRESS_S, ProgressReports, _incident_messages
from elasticd.api.views import views
from elasticd.api.views.instant import Now
from elasticd.base import answers
from elasticd.ctl import output
from elasticd.ctl.client import Client, Failed, Unreachable
from elasticd.ctl.jobs import follow as follow_job
from elasticd.ctl.jobs import lifecycle
from elasticd.ctl.jobs.follow import ProgressLine, Tracebacks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_follow_reports_progress_on_change_at_a_limited_rate() -> None:
    told = ProgressReports("train")
    at = lambda step: snapshot(job(progress=progress(step)))  # noqa: E731
    row = told.look(at(40), 10.0)
    assert row == answers.Progress(
        phase="running", step=40, steps_per_s=row and row.steps_per_s, loss=0.25, world_size=3
    )
    assert told.look(at(41), 10.0 + PROGRESS_S / 2) is None
    assert (later := told.look(at(42), 10.0 + PROGRESS_S))
    assert later.step == 42
    assert told.look(at(42), 20.0) is None
    assert ProgressReports("other").look(at(42), 20.0) is None


def test_progress_in_words() -> None:
    row = ProgressReports("train").look(snapshot(job()), 10.0)
    assert row
    assert follow_job.progress_text(row) == "running  step 40  9.9 steps/s  loss 0.25  world 3"
    pending = answers.Progress(phase="pending", waiting_for="a node")
    assert follow_job.progress_text(pending) == "pending  waits for: a node"


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({}, "exit on a: killed by SIGKILL; world 3 → 3 again in 0.14 s, 0 steps lost"),
        ({"kind": "planned", "node": "", "detail": "b leaves"},
         "planned: b leaves; world 3 → 3 again in 0.14 s, 0 steps lost"),
        ({"steps_lost": None},
         "exit on a: killed by SIGKILL; world 3 → 3 again in 0.14 s, an unknown number of steps lost"),
    ],
)  # fmt: skip
def test_follow_notes_each_incident_that_is_over(facts: dict[str, object], note: str) -> None:
    over = msgspec.structs.replace(job().incidents[0], **facts)
    assert _incident_messages(snapshot(job(incidents=(over,))), "train") == (note,)


@pytest.mark.parametrize(("phase", "ended"), [(Phase.STOPPING, "stopped"), (Phase.FAILED, "given up")])
def test_a_job_that_is_stopped_during_a_recovery_is_not_said_to_be_given_up(phase: Phase, ended: str) -> None:
    last = msgspec.structs.replace(job().incidents[0], world_size_after=0, origin=Origin.NOTHING)
    seen = job(state=JobState(phase=phase), incidents=(last,))
    assert _incident_messages(snapshot(seen), "train") == (f"exit on a: killed by SIGKILL; the job was {ended}",)
    (row,) = plain_views.incidents(snapshot(seen), "train", Now(100.0, 1000.0))
    assert row["verdict"]["done"] == f"the job was {ended}"


def test_follow_result_line_states_the_last_step() -> None:
    done = job(state=JobState(phase=Phase.SUCCEEDED))
    data = views.job_detail(snapshot(done), done, Now(100.0, 1000.0))
    assert follow_job.ended(data) == "train has succeeded at step 40, loss 0.25"
    plain = msgspec.structs.replace(data, step=0, loss=None)
    assert follow_job.ended(plain) == "train has succeeded"
    stopped = msgspec.structs.replace(data, phase="stopped", reason="enough", loss=None, step=None)
    assert follow_job.ended(stopped) == "train has been stopped: enough"


@pytest.mark.parametrize(("stepped_in", "says"), [(0, "without a step: all were made already; "), (3, "")])
def test_a_resume_is_said_and_a_result_without_a_step_is_told_apart(stepped_in: int, says: str) -> None:
    source = "checkpoint step 40 at /ckpt/step-40"
    progress = msgspec.structs.replace(
        job().progress,
        resumed_step=40,
        resumed_from=source,
        stepped_in=stepped_in,  # type: ignore[type-var]
    )
    done = job(state=JobState(phase=Phase.SUCCEEDED), progress=progress)
    data = views.job_detail(snapshot(done), done, Now(100.0, 1000.0))
    told = f"train has succeeded at step 40, loss 0.25 ({says}resumed from step 40: {source})"
    assert follow_job.ended(data) == told
    assert ("without a step" in data.why) == (not stepped_in)


def test_progress_line_fits_one_terminal_line_and_can_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    foot = ProgressLine(out)
    foot.clear()
    assert out.getvalue() == "", "nothing there yet"
    foot.show("x" * 50 + "\x07")
    foot.clear()
    assert out.getvalue() == "\r\x1b[2K" + "x" * 19 + "\r\x1b[2K"
    foot.again()
    assert out.getvalue().endswith("x" * 19)


def test_the_end_of_another_job_that_has_taken_the_name_is_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """`elasticctl run` of the earlier one gave exit code 0, though its job had been stopped."""
    row = {"job": "train", "phase": "running", "submitted_wall_s": 1.0, "reason": "", "step": 5, "loss": None}
    answers = [row, row | {"phase": "succeeded", "submitted_wall_s": 9.0}]
    monkeypatch.setattr(follow_job, "show", lambda *_, **more: True)
    monkeypatch.setattr(Client, "get", lambda *_, **more: answers.pop(0) if len(answers) > 1 else answers[0])
    with pytest.raises(Failed, match="a new job now uses the name train"):
        follow_job.until_over(Client(""), "train", as_json=False)


def scripted(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    def get(*_: object, **more: object) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(follow_job, "show", lambda *_, **more: True)
    monkeypatch.setattr(Client, "get", get)
    monkeypatch.setattr(output.time, "sleep", lambda s: None)


RESTARTING = (Unreachable("the connection to elasticd broke"), Failed(503, "elasticd has not reached etcd yet"))


def test_following_and_waiting_outlive_a_restart_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has just been started does not know the jobs yet, and says so."""
    row = {"job": "train", "phase": "running", "submitted_wall_s": 1.0, "reason": "", "step": 5, "loss": None}
    over = row | {"phase": "succeeded"}
    scripted(monkeypatch, [row, *RESTARTING, row, *RESTARTING, over])
    assert follow_job.until_over(Client(""), "train", as_json=False) == 0
    scripted(monkeypatch, [row, *RESTARTING, over | {"members": 1}, over])
    assert lifecycle.until_over(Client(""), "train", None)["phase"] == "succeeded"


def test_a_stream_goes_on_after_a_restart_of_the_daemon_and_ends_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, streams = [], [[{"n": 1}, {"n": 2}], *RESTARTING, [], [{"n": 3}, {"end": True}, {"n": 4}]]

    def lines(_: Client, path: str, query: Mapping[str, object]) -> Iterator[Any]:
        asked.append(query)
        answer = streams.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield from answer

    def streamed() -> list[Any]:
        return list(output.streamed(Client(""), "/v1/x", {"tail": 9}, lambda last: {"tail": 0, "since": last.get("n")}))

    monkeypatch.setattr(Client, "lines", lines)
    monkeypatch.setattr(output.time, "sleep", lambda s: None)
    assert streamed() == [{"n": 1}, {"n": 2}, {"n": 3}, {"end": True}]
    assert asked == [{"tail": 9}, *[{"tail": 0, "since": 2}] * 4]
    for refusal in (RESTARTING[0], Failed(404, "no such job")):  # it was not there at first; another refusal
        streams[:] = [refusal]
        with pytest.raises(type(refusal)):
            streamed()
    streams[:] = [[{"n": 1}], Failed(404, "no such job")]
    with pytest.raises(Failed, match="no such job"):
        streamed()


def test_a_job_whose_script_fails_after_training_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its phase is `succeeded` until then."""
    row = {"job": "train", "phase": "succeeded", "submitted_wall_s": 1.0, "reason": "", "step": 5, "loss": None}
    answers = [row | {"members": 1}, row | {"members": 1}, row | {"phase": "failed"}]
    scripted(monkeypatch, list(answers))
    assert follow_job.until_over(Client(""), "train", as_json=True) == output.OF_PHASE["failed"]
    scripted(monkeypatch, list(answers))
    assert lifecycle.until_over(Client(""), "train", None)["phase"] == "failed"


def test_a_daemon_that_is_not_there_at_first_and_another_refusal_end_a_wait_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"job": "train", "phase": "running"}
    for told in ([RESTARTING[0]], [row, Failed(404, "no such job")]):
        scripted(monkeypatch, told)
        with pytest.raises(type(told[-1])):
            lifecycle.until_over(Client(""), "train", None)


def test_where_there_is_no_terminal_there_is_no_line() -> None:
    out = io.StringIO()
    ProgressLine(out).show("x")
    assert out.getvalue() == ""


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    f(5)",
    "ValueError: 5",
]


def test_a_traceback_is_shown_once_and_the_workers_that_fail_alike_by_their_last_line() -> None:
    told = Tracebacks()
    shown = [line for text in ("step 1", *TRACEBACK, "after") for line in told.lines("0", text)]
    assert shown == ["step 1", *TRACEBACK, "after"]
    assert [line for text in TRACEBACK for line in told.lines("1", text)] == ["ValueError: 5   (as [0])"]
    assert [line for text in TRACEBACK for line in told.lines("0", text)] == ["ValueError: 5   (as above)"]
    other = [*TRACEBACK[:-1], "ValueError: 6"]
    assert [line for text in other for line in told.lines("1", text)] == other
    assert (told.shown("ValueError: 6\nand more"), told.shown("ValueError: 7")) == (True, False)


def test_the_tracebacks_of_two_workers_may_be_interleaved_and_one_may_not_end() -> None:
    told = Tracebacks()
    shown = [line for text in TRACEBACK for rank in "01" for line in told.lines(rank, text)]
    assert shown == [*TRACEBACK, "ValueError: 5   (as [0])"]
    assert told.lines("0", TRACEBACK[0]) == told.lines("0", TRACEBACK[1]) == []
    assert (list(told.rest()), list(told.rest())) == ([("0", TRACEBACK[:2])], [])
    endless = [line for n in range(600) for line in told.lines("2", f"  frame {n}" if n else TRACEBACK[0])]
    assert len(endless) == 600, "nothing is kept back for ever"
