"""`elasticctl loss` and `report`: what they show of a job's course, and that no text in it becomes markup."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.pages import EVIL, Seen
from support.snapshots import job, progress, snapshot

from elastic.contract.agent_files import History, Point
from elastic.contract.records.job_records import IncidentRecord, JobState, Phase, WorkerError
from elastic.contract.records.ledger import Bucket, Ledger
from elasticd.api.page import report as report_page
from elasticd.api.page import svg
from elasticd.api.routes import job_routes as answers
from elasticd.api.routes import routes
from elasticd.api.views import views
from elasticd.api.views.instant import Identity, Now
from elasticd.base import answers as shared
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.cluster.published_state import PublishedState
from elasticd.ctl.client import Failed
from elasticd.ctl.main import main
from elasticd.ctl.show import course

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
LEDGER = Ledger(until_ms=0, wall_ms=100_000, ranks_ms={bucket.value: 1000 for bucket in Bucket})


def history(*losses: float | None, every_s: float = 2.0) -> shared.History:
    points = [
        shared.Point(wall_s=910.0 + 2 * i, step=i + 1, loss=loss, steps_per_s=1.5, world_size=3)
        for i, loss in enumerate(losses)
    ]
    return shared.History(job="train", node="a", every_s=every_s, points=points)


def detail(**facts: object) -> shared.JobDetail:
    known = job(**{"progress": progress(ledger=LEDGER)} | facts)
    return views.job_detail(snapshot(known), known, NOW)


def incidents(*found: IncidentRecord, **facts: object) -> list[shared.Incident]:
    known = job(**facts | ({"incidents": found} if found else {}))
    return views.incidents(snapshot(known), "", NOW)


def test_the_page_shows_the_job_its_incidents_and_its_ledger() -> None:
    page = report_page.page(detail(), incidents(), history(3.0, 2.0, None, 1.0), 1000.0)
    said = " ".join(Seen(page).texts)
    for wanted in ("running", "Loss", "Steps per second", "goodput", "forming groups", "10.0 %", "144 ms", "0 steps"):
        assert wanted in said, wanted
    assert page.count("<polyline") == 3, "the loss has a gap, the rate has none"
    assert 'rect class="failed"' in page


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = report_page.page(detail(), incidents(), history(3.0, 2.0), 1000.0)
    seen = Seen(page)
    assert not set(seen.tags) & {"script", "link", "img", "iframe", "object", "base", "form", "a"}
    assert not {name for name, _ in seen.attributes} & {"src", "href", "srcset", "action", "style"}
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_no_text_of_a_user_or_a_record_becomes_markup() -> None:
    error = WorkerError(node=EVIL, slot=0, rank=1, message=EVIL, traceback=EVIL)
    state = JobState(phase=Phase.WAITING, reason=EVIL, error=error)
    record = IncidentRecord(generation=2, kind=EVIL, node=EVIL, ranks=(1,), detail=EVIL, wall_s=990.0)
    hostile = detail(state=state, name=EVIL)
    hostile.spec = {"script": EVIL, EVIL: [EVIL], "env": {EVIL: EVIL}}
    hostile.submitted_by = hostile.waiting_for = EVIL
    seen = Seen(report_page.page(hostile, incidents(record), None, 1000.0))
    assert not set(seen.tags) & {"script", "img"}
    assert "onerror" not in {name for name, _ in seen.attributes}
    assert "\x1b" not in "".join(seen.texts)


@pytest.mark.parametrize(
    "facts",
    [
        {"progress": None, "generation": None, "incidents": (), "state": JobState()},
        {"spec": None},
        {"state": JobState(phase=Phase.SUCCEEDED, since_wall_s=0.0)},
        {"state": JobState(phase=Phase.FAILED, since_wall_s=1e300)},
    ],
)
@pytest.mark.parametrize("course_", [None, history(), history(None, None), history(2.0), history(2.0, 2.0)])
def test_a_job_of_which_little_is_known_has_a_page_too(
    facts: dict[str, object], course_: shared.History | None
) -> None:
    page = report_page.page(detail(**facts), incidents(**facts), course_, 1000.0)
    assert "nan" not in page
    assert page.endswith("</body></html>\n")


def test_an_incident_that_lasts_ends_at_the_present() -> None:
    record = IncidentRecord(generation=3, kind="lost", node="b", ranks=(2,), detail="gone", wall_s=950.0, open=True)
    page = report_page.page(detail(), incidents(record), None, 1000.0)
    assert "<td class=n>open</td>" in page
    assert "50.00 s" in page, "in the title of its span"


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(1, 12))
def test_ticks_are_few_round_and_within(low: float, span: float, most: int) -> None:
    found = svg.ticks(low, low + span, most)
    slack = 1e-6 * span + 1e-6 * abs(low) * 1e-3
    assert len(found) <= most + 1
    assert all(low - slack <= tick <= low + span + slack for tick in found)


@given(st.floats(0.001, 1e10))
def test_time_ticks_are_few_and_increase(span_s: float) -> None:
    found = svg.time_ticks(span_s)
    assert 1 <= len(found) <= svg.TICKS + 1
    assert [at for at, _ in found] == sorted({at for at, _ in found})


def test_a_short_incident_is_seen_in_a_long_job() -> None:
    axis = svg.Axis(0.0, 1e6)
    drawn = svg.timeline(axis, [svg.Span(1e6, 1e6 + 0.2, "failed")], "t")
    width = float(drawn.partition('class="failed" ')[2].partition('width="')[2].partition('"')[0])
    assert width == svg.THINNEST


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 80))
def test_a_sparkline_is_as_wide_as_its_values_and_no_wider_than_asked(values: list[float], width: int) -> None:
    line = course.sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(course.BLOCKS)


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert course.sparkline([0.0, 7.0, 3.0, 3.0], 3) == "▁█▄"
    assert course.sparkline([5.0, 5.0], 9) == "▁▁"
    assert course.sparkline([1.0, 2.0], 9, course.ASCII) == "_#"


def test_the_summary_names_first_last_and_lowest() -> None:
    lines = course.summary(history(3.0, None, 0.5, 1.0), 40, course.BLOCKS)
    assert lines[0] == "train: loss 3 at step 1, 1 at step 4"
    assert lines[2] == "lowest 0.5 at step 3"
    assert "no loss" in course.summary(history(None), 40, course.BLOCKS)[0]


class Answers:
    """A daemon's answers."""

    def __init__(self, points: shared.History | None) -> None:
        self._points = points

    def get(self, path: str, query: object = None, timeout_s: float | None = None) -> Any:
        if path.endswith("/history"):
            if self._points is None:
                raise Failed(404, "job 'train' has made no step on node 'a': ask on b")
            return msgspec.to_builtins(self._points)
        if path.startswith("/v1/incidents"):
            return {"incidents": msgspec.to_builtins(incidents())}
        return {"wall_s": 1000.0} if path == "/v1/status" else msgspec.to_builtins(detail())


def called(monkeypatch: pytest.MonkeyPatch, answers_: Answers, *words: str) -> tuple[int, str]:
    monkeypatch.setattr("elasticd.ctl.main.Client", lambda socket: answers_)
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


def test_loss_as_csv_has_a_header_and_empty_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = called(monkeypatch, Answers(history(3.0, None)), "loss", "train", "--csv")
    assert code == 0
    assert said == "wall_s,step,loss,steps_per_s,world_size\n910.0,1,3.0,1.5,3\n912.0,2,,1.5,3\n"


def test_a_report_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "r.html"
    assert called(monkeypatch, Answers(history(3.0)), "report", "train", "-o", str(target))[0] == 0
    assert target.read_text().startswith("<!doctype html>")
    code, said = called(monkeypatch, Answers(history(3.0)), "report", "train", "-o", str(tmp_path / "no" / "r.html"))
    assert (code, "cannot write" in said) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_a_report_without_curves_says_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    code, said = called(monkeypatch, Answers(None), "report", "train", "-o", str(tmp_path / "r.html"))
    assert code == 0
    assert "ask on b" in said
    assert "No curves" in (tmp_path / "r.html").read_text()


def test_a_report_to_a_device_leaves_it_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, Answers(history(3.0)), "report", "train", "-o", "/dev/null")[0] == 0
    assert pathlib.Path("/dev/null").is_char_device()


def written(folder: pathlib.Path, content: bytes) -> shared.History | None:
    (folder / "train" / "agent").mkdir(parents=True)
    (folder / "train" / "agent" / "history.json").write_bytes(content)
    return answers.history(Folder(folder, ("train", "logs")))


def test_the_answer_has_the_points_of_the_file_as_json(tmp_path: pathlib.Path) -> None:
    point = Point(wall_s=5.0, step=3, loss=0.5, steps_per_s=2.0, world_size=4)
    kept = History(submitted_wall_s=1.0, every_s=4.0, points=(point,))
    found = written(tmp_path, msgspec.json.encode(kept))
    assert found == shared.History(
        every_s=4.0, points=[shared.Point(wall_s=5.0, step=3, loss=0.5, steps_per_s=2.0, world_size=4)]
    )


ENDLESS = b'{"submitted_wall_s":1,"every_s":2,"points":[[5,1,1e999,1,1]]}'
"""JSON has no infinite numbers: the answer must have none."""


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[" * 100_000, b'{"submitted_wall_s":1}', b"0" * 3_000_000, ENDLESS]
)
def test_a_file_that_is_no_history_is_none(tmp_path: pathlib.Path, content: bytes) -> None:
    assert written(tmp_path, content) is None


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_bytes(msgspec.json.encode(History(submitted_wall_s=1.0, every_s=2.0)))
    (tmp_path / "train" / "agent").mkdir(parents=True)
    (tmp_path / "train" / "agent" / "history.json").symlink_to(tmp_path / "secret")
    assert answers.history(Folder(tmp_path, ("train", "logs"))) is None


class Asked:
    """A request, and its answer."""

    def __init__(self, folder: pathlib.Path) -> None:
        published = PublishedState()
        published.publish(snapshot(job()))
        identity = Identity("main", "a", "0.1", 7, 0.0, (), False, "")
        logs = lambda name: Folder(folder, (name, "logs"))  # noqa: E731
        self.service = SimpleNamespace(published=published, identity=identity, logs=logs)


def test_a_request_for_the_course_is_answered_or_told_where_it_is(tmp_path: pathlib.Path) -> None:
    asked = Asked(tmp_path)
    answer, names = routes.find("GET", "/v1/jobs/train/history")
    with pytest.raises(Refused, match="has made no step on node 'a': ask on b") as refused:
        answer(asked, {}, **names)
    assert refused.value.status == 404
    with pytest.raises(Refused, match="absent"):
        answer(asked, {}, job="absent")
    spec = job().spec
    assert spec is not None
    written(tmp_path, msgspec.json.encode(History(submitted_wall_s=spec.submitted_wall_s, every_s=4.0)))
    assert answer(asked, {}, **names) == shared.History(job="train", node="a", every_s=4.0)


def test_the_course_of_an_earlier_job_of_the_name_is_not_shown_for_this_one(tmp_path: pathlib.Path) -> None:
    written(tmp_path, msgspec.json.encode(History(submitted_wall_s=1.0, every_s=4.0)))
    asked = Asked(tmp_path)
    answer, names = routes.find("GET", "/v1/jobs/train/history")
    with pytest.raises(Refused, match="has made no step on node 'a': ask on b"):
        answer(asked, {}, **names)
    assert answers.history(Folder(tmp_path, ("train", "logs"))) is not None, "it is, if there is no other one"


def test_a_node_without_the_job_names_nodes_that_have_it() -> None:
    assert answers.nowhere("train", job().generation, "c") == "job 'train' has made no step on node 'c': ask on a, b"
    assert answers.nowhere("train", None, "c") == "job 'train' has made no step on node 'c'"
