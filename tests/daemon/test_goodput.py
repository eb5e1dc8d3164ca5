"""What status says of a job's goodput."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.snapshots import job, progress, snapshot

from elastic.contract.records.job_records import JobState, Phase
from elastic.contract.records.ledger import Bucket, Ledger
from elastic.contract.records.rank_records import RanksRecord, RankTimes
from elastic.contract.records.standings import Stillness
from elasticd.api.metrics import metrics as job_metrics
from elasticd.api.page import report
from elasticd.api.views import views
from elasticd.api.views.instant import Now
from elasticd.diagnosis import goodput

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
LEDGER = Ledger(
    until_ms=0, wall_ms=7_200_000, open_ms=7_000, ranks_ms={"stepping": 980_000, "form": 9_000, "checkpoint": 4_000}
)


def test_every_cause_of_badput_has_words() -> None:
    assert goodput.WORDS.keys() == {*Bucket, goodput.STANDSTILL} - {Bucket.STEPPING}


def test_status_gives_goodput_and_badput_by_cause_the_largest_first() -> None:
    seen = views.job_row(snapshot(job()), job(progress=progress(ledger=LEDGER)), NOW).goodput
    assert goodput.text(seen) == "98.7 % of 2.0 h; badput: forming groups 0.9 %, checkpoint stall 0.4 %"
    assert sum(seen.badput.values()) + seen.goodput == pytest.approx(1)
    assert sum(seen.rank_seconds.values()) + seen.open_rank_seconds == 1000.0
    json.dumps(msgspec.to_builtins(seen), allow_nan=False)


def test_of_a_script_that_commits_no_steps_no_goodput_is_known() -> None:
    """Its time counts as stepping in the ledger once it has run for a while: it may be waiting for a rank for ever."""
    plain = job(progress=progress(ledger=LEDGER, managed=False, step=0))
    row = views.job_detail(snapshot(plain), plain, NOW)
    assert (row.goodput, row.rank_time) == (None, None)
    known = job(progress=progress(ledger=LEDGER, managed=True, step=0))
    assert views.job_row(snapshot(known), known, NOW).goodput is not None


def ranks(node: str, *spent_ms: dict[str, int]) -> RanksRecord:
    rows = [
        RankTimes(slot=slot, rank=slot, since_ms=0, until_ms=sum(each.values()) + 5, ranks_ms=each, open_ms=5)
        for slot, each in enumerate(spent_ms)
    ]
    return RanksRecord(node=node, generation=1, wall_s=1.0, ranks=tuple(rows))


def test_what_all_ranks_did_is_summed_and_each_is_shown_when_the_job_is_over() -> None:
    told = {"a": ranks("a", {"stepping": 890, "form": 105}, {"stepping": 995}), "b": ranks("b", {"waiting": 995})}
    known = job(ranks=told)
    summed = views.job_detail(snapshot(known), known, NOW).rank_time
    spent = "over 1 s; badput: waiting for nodes 33.2 %, forming groups 3.5 %"
    assert goodput.summed_text(summed, 3) == f"63.3 % of 3 ranks {spent}"
    assert goodput.summed_text(summed, 2) == f"63.3 % of 3 ranks, past ones included, {spent}"
    assert (summed.rank_wall_s, summed.accounts) == (3.0, [])
    over = job(ranks=told, state=JobState(phase=Phase.SUCCEEDED))
    data = views.job_detail(snapshot(over), over, NOW)
    assert [(r.node, r.slot) for r in data.rank_time.accounts] == [("a", 0), ("b", 0), ("a", 1)]
    assert data.rank_time.rank_seconds == summed.rank_seconds
    page = report.page(data, [], None, 1000.0)
    assert "Rank by rank: 63.3 % goodput" in page
    assert "waiting for nodes 99.5 %" in page
    found = {f.name: f.samples for f in job_metrics.job_families([data], snapshot(over), {})}
    spent = {each.labels["bucket"]: each.value for each in found["elasticd_job_rank_seconds"]}
    assert spent == summed.rank_seconds


def test_the_time_of_a_job_that_stands_still_is_no_goodput_unless_the_script_has_declared_it() -> None:
    ledger = Ledger(until_ms=0, wall_ms=1_000_000, open_ms=900_000, ranks_ms={"stepping": 100_000})
    of_rank = RankTimes(slot=0, rank=0, since_ms=0, until_ms=1_000_000, ranks_ms={"stepping": 100_000}, open_ms=900_000)
    own = {"a": RanksRecord(node="a", generation=1, wall_s=1.0, ranks=(of_rank,))}
    for declared, wanted in ((False, 0.1), (True, 1.0)):
        still = Stillness(since_wall_s=100.0, node="a", rank=0, because="its process is stopped", declared=declared)
        known = job(ranks=own, progress=progress(ledger=ledger, still=still))
        data = views.job_detail(snapshot(known), known, NOW)
        shown = [data.goodput, data.rank_time, data.ranks[0].time]
        assert [each.goodput for each in shown] == [wanted] * 3, declared
        assert [each.goodput + sum(each.badput.values()) for each in shown[:2]] == pytest.approx([1.0] * 2)
        words = "10.0 % of 16.7 min; badput: standing still 90.0 %"
        assert goodput.text(data.goodput) == ("100.0 % of 16.7 min" if declared else words)
        page = report.page(data, [], None, 1000.0)
        assert page.count("standing still 90.0 %") == (0 if declared else 4)  # job and ranks, twice


def test_a_job_without_a_ledger_has_no_goodput() -> None:
    for known in (progress(), progress(ledger=Ledger(until_ms=5)), None):
        seen = views.job_row(snapshot(job()), job(progress=known), NOW).goodput
        assert seen is None
        assert goodput.text(seen) == ""


@pytest.mark.parametrize(
    ("share", "said"), [(1.0, "100.0 %"), (0.99999, "99.9 %"), (0.0001, "< 0.1 %"), (0.0, "0.0 %"), (0.5, "50.0 %")]
)
def test_percent_rounds_nothing_to_all_or_none(share: float, said: str) -> None:
    assert goodput.percent(share) == said
