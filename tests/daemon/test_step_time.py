"""What status says of where a step's time goes."""

from __future__ import annotations

import msgspec
from support.snapshots import job, progress, row, snapshot

from elastic.contract.records.job_records import ProgressRecord, RankRow
from elastic.contract.step_parts import StepParts
from elasticd.api.metrics import metrics as job_metrics
from elasticd.api.views import views
from elasticd.api.views.instant import Now
from elasticd.base.answers import StepTime
from elasticd.diagnosis import step_time

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
CPU = StepParts(step_s=0.12, data_s=0.003, compute_s=0.06, collectives_s=0.036, optimizer_s=0.012, snapshot_s=0.0)
GPU = StepParts(step_s=0.1, data_s=0.01, compute_s=None, collectives_s=None, optimizer_s=None, snapshot_s=0.0)


def ranks(*of: StepParts | None) -> list[object]:
    rows: list[RankRow] = [msgspec.structs.replace(row(i, "a", i), parts=each) for i, each in enumerate(of)]
    return [msgspec.to_builtins(each) for each in rows]


def slow_ranks_text(known: ProgressRecord) -> str:
    return step_time.text(views.job_row(snapshot(job()), job(progress=known), NOW).step_time)


def test_shares_are_given_the_largest_first_and_what_takes_no_time_is_left_out() -> None:
    wanted = "120 ms: compute 50.0 %, collectives 30.0 %, optimizer 10.0 %, data 2.5 %"
    assert slow_ranks_text(progress(ranks=ranks(CPU, CPU, None))) == wanted


def test_what_a_gpu_does_not_tell_is_said_to_be_missing() -> None:
    assert slow_ranks_text(progress(ranks=ranks(GPU))) == "100 ms: data 10.0 %; the rest is not measured yet"


def test_a_slow_rank_is_named() -> None:
    slow = [{"rank": 3, "node": "b", "ratio": 1.8}]
    assert slow_ranks_text(progress(ranks=ranks(CPU), slow_ranks=slow)).endswith(
        "; rank 3 on b takes 1.8 times as long as the others"
    )
    row = views.job_row(snapshot(job()), job(progress=progress(ranks=ranks(CPU), slow_ranks=slow)), NOW)
    found = {f.name: f.samples for f in job_metrics.job_families([row], snapshot(job()), {})}
    (sample,) = found["elasticd_job_slow_rank_ratio"]
    assert (sample.labels, sample.value) == ({"job": row.job, "rank": "3", "node": "b"}, 1.8)


def test_nothing_is_said_before_anything_is_measured() -> None:
    assert slow_ranks_text(progress()) == ""
    assert slow_ranks_text(progress(ranks=ranks(None))) == ""


def test_shares_of_a_step_do_not_add_up_to_more_than_all_of_it() -> None:
    """The parts and the step are means of their own."""
    parts = dict.fromkeys(step_time.PARTS, None) | {"compute": 0.08, "data": 0.045}
    assert step_time.text(StepTime(step_s=0.1, parts_s=parts)).startswith("100 ms: compute 64.0 %, data 36.0 %")
