"""What status says of a job's goodput."""

from __future__ import annotations

import json

import pytest
from support.pictures import job, progress, snapshot

from elastic.contract.ledger import Bucket, Ledger
from elasticd.api import views
from elasticd.api.views import Now
from elasticd.diagnosis import goodput

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
LEDGER = Ledger(
    until_ms=0, wall_ms=7_200_000, open_ms=7_000, ranks_ms={"stepping": 980_000, "form": 9_000, "checkpoint": 4_000}
)


def test_every_cause_of_badput_has_words() -> None:
    assert goodput.WORDS.keys() == set(Bucket) - {Bucket.STEPPING}


def test_status_gives_goodput_and_badput_by_cause_the_largest_first() -> None:
    seen = views.job_row(snapshot(job()), job(progress=progress(ledger=LEDGER)), NOW)["goodput"]
    assert goodput.text(seen) == "98.7 % of 2.0 h; badput: forming groups 0.9 %, checkpoint stall 0.4 %"
    assert sum(seen["badput"].values()) + seen["goodput"] == pytest.approx(1)
    assert sum(seen["rank_seconds"].values()) + seen["open_rank_seconds"] == 1000.0
    json.dumps(seen, allow_nan=False)


def test_a_job_without_a_ledger_has_no_goodput() -> None:
    for known in (progress(), progress(ledger=Ledger(until_ms=5)), None):
        seen = views.job_row(snapshot(job()), job(progress=known), NOW)["goodput"]
        assert seen is None
        assert goodput.text(seen) == ""


@pytest.mark.parametrize(
    ("share", "said"), [(1.0, "100.0 %"), (0.99999, "99.9 %"), (0.0001, "< 0.1 %"), (0.0, "0.0 %"), (0.5, "50.0 %")]
)
def test_percent_rounds_nothing_to_all_or_none(share: float, said: str) -> None:
    assert goodput.percent(share) == said
