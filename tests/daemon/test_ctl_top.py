"""elasticctl top: what it makes of the daemon's answers, and that it fits a screen."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from support.snapshots import job, progress, row, snapshot

from elastic.contract.records.rank_records import RanksRecord, RankTimes
from elasticd.api.views import views
from elasticd.api.views.instant import Now
from elasticd.base.answers import EtcdContact, JobDetail, Rank, SlowRank, StepTime, printable
from elasticd.base.command_answers import Top
from elasticd.cluster.published_state import Contact
from elasticd.ctl.jobs import top as ctl_top
from elasticd.ctl.show.screen import Console


def detail(steps: list[int | None], **facts: Any) -> JobDetail:
    data = views.job_detail(snapshot(job()), job(), Now(100.0, 1000.0))
    one = {"node": "a", "slot": 0, "pid": 7, "phase": "computing", "rss_mb": 100.0, "step_s": 0.0123, "incarnation": 0}
    ranks = [Rank(**one | {"rank": i, "step": step}) for i, step in enumerate(steps)]
    return msgspec.structs.replace(data, **{"ranks": ranks, **facts})


def shown(data: Top, width: int, height: int | None = None) -> str:
    out = io.StringIO()
    Console(out, width).print(*ctl_top.screen(printable(data), width, height))
    return out.getvalue()


def whole(*jobs: JobDetail) -> Top:
    return Top(cluster="main", wall_s=1.0, etcd=EtcdContact(connected=True), jobs=list(jobs))


def ranks_at(*steps: int, **more: Any) -> list[tuple[int | None, int | None]]:
    rows = [msgspec.to_builtins(row(i, "a", i, step=step)) for i, step in enumerate(steps)]
    known = job(progress=progress(ranks=rows))
    ranks = views.job_detail(snapshot(known, **more), known, Now(100.0, 1000.0)).ranks
    return [(each.step, each.behind) for each in ranks]


def test_ranks_are_behind_the_foremost() -> None:
    assert ranks_at(40, 38)[:2] == [(40, 0), (38, 2)]
    cut_off = ranks_at(40, 38, contact=Contact(False, 40.0, "refused"))  # the steps of one are not those of now
    assert cut_off[:2] == [(40, None), (38, None)]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_wider_than_the_screen_and_a_rank_takes_one(width: int) -> None:
    text = shown(whole(detail([40, 38, None])), width)
    assert max(map(len, text.splitlines())) <= width
    assert sum("computing" in line for line in text.splitlines()) == 3
    assert "12 ms" in text


def test_a_large_job_is_cut_at_the_height_of_the_screen() -> None:
    text = shown(whole(detail([1] * 100)), 80, 24)
    assert len(text.splitlines()) <= 24
    assert "more ranks" in text


def test_escape_codes_in_a_record_do_not_reach_the_screen() -> None:
    data = detail([1])
    data.ranks[0].phase = "\x1b[2J"
    assert "\x1b" not in shown(whole(data), 80)


def test_no_job() -> None:
    assert "no job runs" in shown(whole(), 80)


def test_a_slow_rank_is_named_below_the_line_of_its_job() -> None:
    slow = SlowRank(rank=3, node="b\x1b[2J", ratio=1.8)
    data = detail([1] * 100, step_time=StepTime(slow_ranks=[slow] * 50))
    text = shown(whole(data), 100, 24)
    assert "takes 1.8 times as long as the others" in text.splitlines()[3]
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 24


def test_ranks_of_other_nodes_are_shown_as_their_agents_published_them() -> None:
    """Some seconds old, so they are compared with no other rank's step."""
    far = row(2, "b", 0, step=33, step_s=0.046, rss_mb=812.0)
    both = (RankTimes(slot=slot, rank=rank, since_ms=0, until_ms=1, row=far) for slot, rank in ((0, 2), (9, 9)))
    record = RanksRecord(node="b", generation=2, wall_s=992.0, ranks=tuple(both))
    known = job(progress=progress(ranks=[msgspec.to_builtins(row(0, "a", 0))]), ranks={"b": record})
    seen = views.job_detail(snapshot(known), known, Now(100.0, 1000.0))
    ranks = {each.rank: each for each in seen.ranks}
    assert set(ranks) == {0, 1, 2}
    assert [getattr(ranks[2], key) for key in ("step", "phase", "step_s", "rss_mb", "age_s", "behind")] == [
        33, "computing", 0.046, 812.0, 8.0, None,
    ]  # fmt: skip
    assert (ranks[0].age_s, ranks[0].behind) == (None, 0)
    assert "46 ms  812 MB  8 s ago" in shown(whole(seen), 100)
    stale = job(ranks={"b": msgspec.structs.replace(record, generation=1)}, progress=None)
    of_before = views.job_detail(snapshot(stale), stale, Now(100.0, 1000.0)).ranks
    assert [each.step for each in of_before] == [None] * 3, "its slots have other ranks now"
