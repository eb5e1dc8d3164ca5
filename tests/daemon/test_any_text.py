"""No text in any field of any view, however strange or long, breaks the view: nothing raises, no control character
reaches the terminal, no line is wider than it, and nothing is read as markup."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from support import plain_render, plain_views
from support.snapshots import job, progress, row, snapshot

from elastic.contract.records.job_records import JobState, Phase, WorkerError
from elasticd.api.views.instant import Identity, Now
from elasticd.base import safe_text
from elasticd.cluster.assignment import Assignment
from elasticd.cluster.published_state import Contact
from elasticd.ctl import main as ctl
from elasticd.ctl.client import Failed
from elasticd.ctl.show import render
from elasticd.ctl.show.screen import Console

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
IDENTITY = Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:59442"
NASTY = (GLOO, "[/rack 7] is hot", "[red]x[/red]", ":smile:", "\x1b[2J\x1b]0;owned\x07", "a\r\nb\tc\x85\u2028",
         "\u202eevil", "\ud800", "漢" * 90, "e\u0301" * 80, "\0", "x" * 5000, "")  # fmt: skip
"""Tried in every field, whatever else is drawn."""
PIECES = ("[", "]", "[/", "\\", "\x1b[", "\x9b", "31m", "x", " ", "\n", "漢")

TEXT = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(), max_size=120),
    st.lists(st.sampled_from(["[", "]", "[/", "\\", "\x1b[", "\x9b", "31m", "x", " ", "\n", "漢"]), max_size=30).map(
        "".join
    ),
)


def texts_into(template: Any, draw: st.DrawFn, field: str = "") -> Any:
    """The answer with another text in place of each of its texts; what a program compares stays."""
    if isinstance(template, str):
        return template if field in ("health", "phase", "state") else draw(TEXT)
    if isinstance(template, dict):
        texts = field in ("timeline_s", "stacks", "member_nodes")
        return {(draw(TEXT) if texts else k): texts_into(v, draw, k) for k, v in template.items()}
    if isinstance(template, list):
        return [texts_into(value, draw, field) for value in template]
    return template


def answers() -> dict[str, Any]:
    error = WorkerError(node="a", slot=1, rank=-1, message="m", traceback="t\nt", exit_code=1, signal="s", step=39)
    one = job(
        state=JobState(phase=Phase.WAITING, reason="r", error=error, excluded_nodes=("a",)),
        progress=progress(checkpoint_error="e", checkpoint_step=4, waiting_for="w", ranks=[{**_as_row()}]),
    )
    seen = snapshot(
        one, contact=Contact(False, 40.0, "refused"), plan=Assignment(waiting={"train": "w"}), stays_out="x"
    )
    status = plain_views.status(seen, IDENTITY, NOW)
    detail = plain_views.job_detail(seen, one, NOW) | {"etcd": status["etcd"]}
    incident = detail["recent_incidents"][0] | {"stacks": {"rank 0": "s\ns"}, "error": detail["error"]}
    return {
        "status": status,
        "jobs": status["jobs"],
        "nodes": status["nodes"],
        "job": detail,
        "incidents": [incident],
        "incident": incident,
        "checkpoints": [
            {"path": "/a/step-4", "state": "good", "detail": "", "step": 4, "job": "j", "nbytes": 9},
            {"path": "/a/step-5", "state": "bad", "detail": "d"},
        ],
        "config": {
            "settings": [{"name": "n", "value": "v", "source": "s", "doc": "d"},
                         {"name": "n", "value": ["v", "w"], "source": "s", "doc": "d"}],
            "hierarchy": [{"below": "b", "below_s": 1.0, "factor": 2, "above": "a", "above_s": 2.0, "why": "w"}],
        },
    }  # fmt: skip


def _as_row() -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(row(2, "b", 0))
    return found


ANSWERS = answers()
SHOW = {name: getattr(plain_render, name) for name in ANSWERS}


def screen(view: str, data: Any, width: int) -> str:
    out = io.StringIO()
    terminal = Console(out, width, terminal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "Console", lambda: terminal)
        SHOW[view](data)
    return out.getvalue()


def assert_sound(text: str, width: int) -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the colours that are ours
    assert not re.search(r"[^\n\x20-\U0010ffff]|[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", plain)
    wide = [part for part in plain.split("\n") if cell_len(part) > width]
    assert not wide, wide[:2]


@pytest.mark.parametrize("view", ANSWERS)
@given(data=st.data(), width=st.sampled_from([20, 80, 120, 200]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_in_any_field(view: str, data: st.DataObject, width: int) -> None:
    drawn = data.draw(st.composite(lambda draw: texts_into(ANSWERS[view], draw))())
    assert_sound(screen(view, drawn, width), width)


def put(template: Any, text: str, field: str = "") -> Any:
    """The template with `text` in place of each text that a program does not compare."""
    if isinstance(template, str):
        return template if field in ("health", "phase", "state") else text
    if isinstance(template, dict):
        return {k: put(v, text, k) for k, v in template.items()}
    return [put(v, text, field) for v in template] if isinstance(template, list) else template


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("view", ANSWERS)
def test_views_stay_sound_with_strange_text_in_every_field(view: str, text: str) -> None:
    shown = screen(view, put(ANSWERS[view], text), 80)
    assert_sound(shown, 80)
    if text in (GLOO, "[red]x[/red]", ":smile:"):
        assert text.split()[0][:8] in re.sub(r"\x1b\[[0-9;]*m", "", shown), "shown as it is, not read as markup"


@given(TEXT)
@example("\r")
@settings(max_examples=200, deadline=None)
def test_worker_output_keeps_colours_and_no_other_control_characters(text: str) -> None:
    said = safe_text.output(text)
    plain = re.sub(r"\x1b\[[0-9;:]*m", "", said)
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", plain)


def test_colours_end_with_their_line_and_a_progress_bar_shows_its_last_state() -> None:
    assert safe_text.output("\x1b[31mred\tx") == "\x1b[31mred\tx\x1b[0m"
    assert safe_text.output("\x1b[2Jgone\x07") == "\\x1b[2Jgone\\x07"
    assert safe_text.output(" 1%\r 50%\r100%\r") == "100%"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert safe_text.line("x" * 3000).endswith("x… (1000 more characters)")
    assert "characters left out" in safe_text.block("x" * 60_000)


def test_names_and_phases_stay_whole_on_80_columns() -> None:
    name = "resnet-50-imagenet-lr-0.1"
    detail = ANSWERS["status"]["jobs"][0] | {"job": name, "phase": "succeeded", "step": 123_456, "waiting_for": ""}
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen("jobs", [detail], 80)).splitlines()
    assert re.match(rf"{name} +succeeded ", lines[1])
    assert "123456" in lines[1]
    assert len([part for part in lines if part.strip()]) == 2, lines


def test_a_checkpoint_of_an_earlier_agent_has_no_age_and_is_there() -> None:
    saved = {"step": 150, "age_s": None, "error": None, "failed": 0, "interval": "auto", "skipped": 0}
    text = screen("job", ANSWERS["job"] | {"checkpoint": saved}, 80)
    assert "step 150; auto" in text
    assert "none yet" in screen("job", ANSWERS["job"] | {"checkpoint": saved | {"step": None}}, 80)


def test_a_worker_without_a_rank_is_named_by_its_slot() -> None:
    text = screen("job", ANSWERS["job"], 80)
    assert "the worker in slot 1 on a failed first at step 39" in text
    assert "rank -1" not in text


def test_a_job_without_a_generation_says_so() -> None:
    bare = ANSWERS["job"] | {"generation": 0, "world_size": 0, "why_generation": ""}
    assert re.search(r"generation.*none yet", re.sub(r"\x1b\[[0-9;]*m", "", screen("job", bare, 80)))


JOB_COMMANDS = ("status", "incidents", "logs", "stop", "forget")
COMMANDS = [
    *([name] for name in ("status", "jobs", "nodes", "incidents")),
    *([name, "TEXT"] for name in (*JOB_COMMANDS, "drain", "cordon", "uncordon", "submit", "run", "frobnicate")),
    ["scale", "TEXT", "TEXT"], ["drain", "n", "--reason", "TEXT", "--deadline", "TEXT"], ["logs", "j", "-n", "TEXT"],
    ["run", "-e", "TEXT", "--nodes", "TEXT", "-w", "TEXT", "--name", "TEXT", "--", __file__, "TEXT"],
    ["run", "--set", "TEXT", "--detach", "--", __file__], ["run", "-m", "TEXT"], ["TEXT"], ["--TEXT"],
    ["wait", "TEXT"], ["restart", "TEXT"], ["top", "TEXT", "--once"], ["drain", "TEXT", "--wait", "--timeout", "0"],
    ["drain", "TEXT", "--dry-run"],
    ["config", "show", "--explain"], ["checkpoint", "now", "TEXT"], ["incidents", "--full", "--last", "TEXT"],
]  # fmt: skip


class Answers:
    """In place of the daemon: each of its answers and refusals is full of one strange text."""

    def __init__(self, text: str, refuses: bool) -> None:
        self._text, self._refuses = text, refuses

    def _say(self, template: Any) -> Any:
        if self._refuses:
            raise Failed(409, f"refused {self._text}")
        return put(template, self._text)

    def get(self, path: str, *_: Any, **__: Any) -> Any:
        if path.startswith("/v1/jobs/"):
            return self._say(ANSWERS["job"] | {"phase": "stopped", "members": 0})
        if path.endswith("/drain"):
            return self._say({"node": "n", "jobs": [{"job": "j", "effect": "stops", "text": "j stops"}]})
        if path.startswith("/v1/nodes/"):
            return self._say({"node": "n", "jobs": ["j"], "empty": True, "state": "ready", "reason": ""})
        if path == "/v1/incidents":
            return self._say({"incidents": ANSWERS["incidents"]})
        return self._say(ANSWERS["config"] if path == "/v1/config" else ANSWERS["status"])

    def post(self, path: str, body: Any = None) -> Any:
        return self._say({"job": "j", "phase": "stopped"})

    delete = post

    def lines(self, path: str, query: Any) -> Any:
        yield self._say({"line": "l", "rank": 0, "slot": 0, "file": "f"})
        yield self._say({"note": "n", "cut": True})
        yield {"end": True, "phase": "failed", "elsewhere": {self._text: [1]}}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@given(text=TEXT, refuses=st.booleans(), as_json=st.booleans())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_at_any_command(command: list[str], text: str, refuses: bool, as_json: bool) -> None:
    words = [word.replace("TEXT", text) for word in command]
    if as_json:
        # What follows the script of `run` are the script's own options.
        at = 1 if command[0] == "run" else len(command)
        words.insert(command.index("--") if "--" in command else at, "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctl, "Client", lambda _: Answers(text, refuses))
        patch.setenv("COLUMNS", "80")
        done = CliRunner().invoke(ctl.main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in range(7)
    if command[0] not in ("logs", "run") or as_json:  # those pass on what workers wrote, into a pipe unchanged
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
        assert not re.search(r"[^\n\x20-\U0010ffff]|[\x7f-\x9f\u202a-\u202e]", plain)
    if as_json and "--" not in words[: words.index("--json")]:
        left = done.stdout
        while left := left.strip():
            _, end = json.JSONDecoder().raw_decode(left)
            left = left[end:]


def test_in_a_pipe_no_end_of_a_line_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(render, "Console", lambda: Console(out, 80))
    plain_render.job(ANSWERS["job"] | {"why": "word " * 60 + "end"})
    assert "word end\n" in out.getvalue()
