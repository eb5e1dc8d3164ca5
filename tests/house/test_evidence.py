"""Each figure that a page quotes from a record is the record's; a figure that was edited by hand is seen."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from support.source import ROOT


def load() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["evidence"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


evidence = load()
MADE = {
    "recovery": {
        "figures": {
            "kill_median_s": 0.3684,
            "lost": 0,
            "each_s": [0.4, 0.3],
            "torchrun": {"median_s": 8.61},
            "steps": 42_080,
        }
    }
}


def test_every_quoted_figure_is_its_records() -> None:
    made = evidence.records()
    pages = {str(path.relative_to(ROOT)): path.read_text() for path in evidence.pages()}
    quotes = [quote for page, text in pages.items() for quote in evidence.quotes(page, text)]
    assert [problem for quote in quotes if (problem := evidence.wrong(quote, made))] == []
    assert sum(path.stat().st_size for path in evidence.RECORDS.glob("*.json")) < 200_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("**0.37 s**<!-- recovery.kill_median_s -->", ""),
        ("0.368<!-- recovery.kill_median_s -->", ""),
        ("**0**<!-- recovery.lost -->", ""),
        ("8.6 s<!-- recovery.torchrun.median_s -->", ""),
        ("42,080 steps<!-- recovery.steps -->", ""),
        ("0.3<!-- recovery.each_s.least --> – ", ""),
        ("0.4<!-- recovery.each_s.most -->", ""),
        ("0.3<!-- recovery.each_s.most -->", "0.3 is quoted"),
        ("**0.36 s**<!-- recovery.kill_median_s -->", "0.36 is quoted"),
        ("**1**<!-- recovery.lost -->", "1 is quoted"),
        ("0.37 s<!-- recovery.kill -->", "no such figure"),
        ("0.37 s<!-- other.kill_median_s -->", "no such figure"),
    ],
)
def test_a_figure_edited_by_hand_is_seen(text: str, problem: str) -> None:
    (quote,) = evidence.quotes("README.md", f"| row | {text} |")
    found = evidence.wrong(quote, MADE)
    assert problem in found
    assert bool(problem) is bool(found)


def test_pages_are_given_the_records_values_with_the_digits_and_the_text_that_they_have() -> None:
    page = "**0.4 s**<!-- recovery.kill_median_s -->, 1,000 steps<!-- recovery.steps -->, 7<!-- other.x -->, 0.3, 9"
    now = "**0.4 s**<!-- recovery.kill_median_s -->, 42,080 steps<!-- recovery.steps -->, 7<!-- other.x -->, 0.3, 9"
    assert evidence.quoted(page, MADE) == now
    assert evidence.quoted("0.111<!-- recovery.kill_median_s -->", MADE) == "0.368<!-- recovery.kill_median_s -->"


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("def f():\n    '''Another text.'''\n    return 1  # and a comment\n", True),
        ("def f():\n    return 2\n", False),
        ("def f():\n    return 1\n\n\ndef g():\n    pass\n", False),
    ],
)
def test_a_comment_is_no_change_of_what_was_measured(source: str, same: bool) -> None:
    assert (evidence.syntax(source) == evidence.syntax('def f():\n    """A text."""\n    return 1\n')) is same


def test_how_much_a_stale_record_differs_now_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(evidence, "measure", lambda *_: {"kill_median_s": 0.4, "torchrun": {"median_s": 20.0}})
    quoted = [evidence.Quote("README.md", "", "recovery", name) for name in ("kill_median_s", "torchrun.median_s")]
    (problem,) = evidence.differences("recovery", MADE["recovery"]["figures"], quoted)
    assert problem == "recovery.torchrun.median_s: +132%, more than the tolerance of 50%"
    assert "kill_median_s: 0.3684 then, 0.4 now, +9%" in capsys.readouterr().out


def test_a_record_of_other_code_is_stale(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(evidence, "records", lambda: {
        "recovery": {"date": "2026-11-28", "commit": "1", "measured": measured, "figures": {"kill_median_s": 0.37}}
    })  # fmt: skip
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("0.37 s<!-- recovery.kill_median_s -->")
    measured = evidence.digest("recovery")
    assert evidence.check(False) == 0
    (tmp_path / "elastic" / "agent").mkdir(parents=True)
    (tmp_path / "elastic" / "agent" / "more.py").write_text("x = 1\n")
    assert evidence.check(False) == 1
    assert "recovery is stale" in capsys.readouterr().out
