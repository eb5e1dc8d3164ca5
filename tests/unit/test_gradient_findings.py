"""What samples of the ranks' gradients say, and ranks that are slow in the whole job."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs import generation, place

from elastic.contract.records.rank_records import RanksRecord, RankTimes, Sample
from elastic.contract.step_parts import WINDOWS
from elasticd.cluster.cluster import Cluster, Job
from elasticd.diagnosis import gradients, step_time, timeline


def sample(**facts: Any) -> Sample:
    return Sample(**({"step": 40, "gradients": "", "weights": "w"} | facts))


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({0: sample(gradients="a"), 1: sample(gradients="b")}, []),
        ({0: sample(), 1: sample()}, []),
        ({0: sample(gradients="a"), 1: sample(gradients="b"), 2: sample(gradients="a")},
         ["ranks 0, 2 have the same gradients before they are averaged: they train on the same samples, or on none"]),
        ({0: sample(), 1: sample(weights="x"), 2: sample()},
         ["the weights of rank 1 differ from those of the other replicas"]),
        ({0: sample(), 1: sample(weights="x")},
         ["the replicas' weights differ, and no majority is equal: ranks 0, 1"]),
        ({0: sample(bad="fc.weight"), 1: sample()}, ["the gradient of fc.weight is not finite on rank 0"]),
        ({0: sample(without=("a", "b")), 1: sample(without=("a", "b"))},
         ["no gradient reaches a, b on all ranks: unused in the loss, or frozen without requires_grad = False"]),
        ({0: sample(), 1: sample(without=("a", "b", "c", "d", "e"))},
         ["no gradient reaches a, b, c, d and 1 more on rank 1: unused in the loss, or frozen without requires_grad = "
          "False"]),
    ],
)  # fmt: skip
def test_each_fault_of_the_gradients_is_named_with_its_ranks(samples: dict[int, Sample], said: list[str]) -> None:
    assert list(gradients.findings(samples)) == said


def test_norms_of_a_layer_are_those_of_all_its_parameters() -> None:
    rows = [["fc.weight", 3.0, 6.0, 1.0, True, False], ["fc.bias", 4.0, None, 0.0, True, False],
            ["scale", None, None, 2.0, True, False]]  # fmt: skip
    held = {"rank": 1, "step": 40, "gradients": "g", "weights": "w", "rows": rows}
    assert gradients.layers([held]) == [
        {"layer": "fc", "own": {"1": 5.0}, "mean": {"1": 6.0}, "weight": {"1": 1.0}},
        {"layer": "scale", "own": {}, "mean": {}, "weight": {"1": 2.0}},
    ]
    assert gradients.in_short([held])[1] == sample(gradients="g", without=("scale",))


def job(own_s: dict[int, tuple[float, ...]], samples: dict[int, Sample] | None = None, number: int = 3) -> Job:
    """A job of four nodes with a rank each."""
    ranks = {}
    for rank, windows in own_s.items():
        times = RankTimes(slot=0, rank=rank, since_ms=0, until_ms=1, own_s=windows, sample=(samples or {}).get(rank))
        ranks[f"n{rank}"] = RanksRecord(node=f"n{rank}", generation=number, wall_s=1.0, ranks=(times,))
    return Job("job", generation=generation(3, [place(f"n{rank}", 0) for rank in range(4)]), ranks=ranks)


EVEN, SLOW = (0.1,) * WINDOWS, (0.17,) * WINDOWS


def test_a_rank_that_is_slower_than_the_median_of_the_job_is_named_though_it_is_alone_on_its_node() -> None:
    found = job({0: EVEN, 1: EVEN, 2: SLOW, 3: EVEN})
    assert [(s.rank, s.node, s.ratio) for s in step_time.slow_ranks(found.ranks, 3)] == [(2, "n2", 1.7)]


@pytest.mark.parametrize(
    "own_s",
    [
        {0: EVEN, 1: EVEN, 2: SLOW[1:], 3: EVEN},
        {0: EVEN, 1: EVEN, 2: (0.1, 0.17, 0.17), 3: EVEN},
        {2: SLOW},
        {0: SLOW, 1: SLOW, 2: SLOW, 3: SLOW},
    ],
)
def test_fewer_than_three_slow_windows_name_no_rank(own_s: dict[int, tuple[float, ...]]) -> None:
    assert step_time.slow_ranks(job(own_s).ranks, 3) == []


def test_windows_of_an_earlier_generation_do_not_count() -> None:
    assert step_time.slow_ranks(job({0: EVEN, 1: EVEN, 2: SLOW, 3: EVEN}, number=2).ranks, 3) == []


def events(before: Job, after: Job) -> list[tuple[str, str, str]]:
    one = Cluster({}, {"job": before}, {}, {}, 1, {}, {}, {})
    other = Cluster({}, {"job": after}, {}, {}, 2, {}, {}, {})
    return [(e.kind, e.node, e.text) for e in timeline.happened(one, other, 9.0)]


def test_a_rank_that_becomes_slow_and_a_new_sample_are_one_event_each() -> None:
    bad = {rank: sample(weights="x" if rank == 3 else "w") for rank in range(4)}
    before, slow = job(dict.fromkeys(range(4), EVEN)), job({0: EVEN, 1: EVEN, 2: SLOW, 3: EVEN}, bad)
    assert events(before, slow) == [
        ("rank.slow", "n2", "rank 2 takes 1.7 times as long for a step as the median of the others"),
        ("job.gradients", "", "step 40: the weights of rank 3 differ from those of the other replicas"),
    ]
    assert events(slow, job({0: EVEN, 1: EVEN, 2: SLOW, 3: EVEN}, bad)) == []


def test_a_sample_counts_once_all_ranks_have_it_of_the_same_step() -> None:
    some = {rank: sample(weights=str(rank)) for rank in range(3)}
    known = job(dict.fromkeys(range(4), EVEN), some)
    assert gradients.newest(known.ranks, 3, 4) == (0, {})
    mixed = job(dict.fromkeys(range(4), EVEN), {**some, 3: sample(step=41)})
    assert gradients.newest(mixed.ranks, 3, 4) == (0, {})
