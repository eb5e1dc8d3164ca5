"""elasticctl top: what it makes of the daemon's answers, and that it fits a screen."""

from __future__ import annotations

import io

import pytest
from support.pictures import job, snapshot

from elasticd.api import views
from elasticd.api.views import Now
from elasticd.ctl import top as ctl_top
from elasticd.ctl.screen import Console


def detail(steps: list[int | None]) -> views.Json:
    data = views.job_detail(snapshot(job()), job(), Now(100.0, 1000.0))
    one = {"node": "a", "slot": 0, "pid": 7, "phase": "computing", "rss_mb": 100.0, "step_s": 0.0123, "incarnation": 0}
    return data | {"ranks": [one | {"rank": i, "step": step} for i, step in enumerate(steps)]}


def shown(data: views.Json, width: int, height: int | None = None) -> str:
    out = io.StringIO()
    Console(out, width).print(*ctl_top.screen(data, width, height))
    return out.getvalue()


def whole(*jobs: views.Json) -> views.Json:
    return {"schema": 1, "cluster": "main", "wall_s": 1.0, "etcd": True, "nodes": [], "jobs": list(jobs)}


def test_ranks_are_behind_the_foremost() -> None:
    seen = ctl_top.of_job(detail([40, 38, None]))
    assert [row["behind"] for row in seen["ranks"]] == [0, 2, None]
    cut_off = ctl_top.of_job(detail([40, 38]) | {"etcd": {"connected": False}})  # the steps of one are not those of now
    assert [(row["step"], row["behind"]) for row in cut_off["ranks"]] == [(40, None), (38, None)]
    assert seen["step_s"] == pytest.approx(0.1012)
    assert ctl_top.of_job(detail([])) | {"ranks": []} == ctl_top.of_job(detail([]))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_wider_than_the_screen_and_a_rank_takes_one(width: int) -> None:
    text = shown(whole(ctl_top.of_job(detail([40, 38, None]))), width)
    assert max(map(len, text.splitlines())) <= width
    assert sum("computing" in line for line in text.splitlines()) == 3
    assert "12 ms" in text


def test_a_large_job_is_cut_at_the_height_of_the_screen() -> None:
    text = shown(whole(ctl_top.of_job(detail([1] * 100))), 80, 24)
    assert len(text.splitlines()) <= 24
    assert "more ranks" in text


def test_escape_codes_in_a_record_do_not_reach_the_screen() -> None:
    data = detail([1])
    data["ranks"][0]["phase"] = "\x1b[2J"
    assert "\x1b" not in shown(whole(ctl_top.of_job(data)), 80)


def test_no_job() -> None:
    assert "no job runs" in shown(whole(), 80)


def test_a_slow_rank_is_named_below_the_line_of_its_job() -> None:
    slow = {"rank": 3, "node": "b\x1b[2J", "ratio": 1.8}
    data = ctl_top.of_job(detail([1] * 100) | {"step_time": {"slow_ranks": [slow] * 50}})
    assert data["slow_ranks"] == [slow] * 50
    text = shown(whole(data), 100, 24)
    assert "takes 1.8 times as long as the others" in text.splitlines()[3]
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 24
