"""Where a step's time goes, from the marks on beat pages, and which rank is slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.reports.step_times import StepTimes, own_s, parts
from elastic.contract.records.job_records import RankRow
from elastic.contract.step_parts import SLOWER, StepParts, slow_ranks
from elastic.contract.worker.beat import PAGE_BYTES, Beat, BeatPage, Doing

WINDOW_S = 10.0


class Worker:
    """A beat page, and the marks that a training loop makes on it."""

    def __init__(self, rank: int = 0, generation: int = 1) -> None:
        self.now_s = 100.0
        self.page = BeatPage(memoryview(bytearray(PAGE_BYTES)))
        self.page.clear(self.now_s)
        self.page.place(generation, rank)
        self.step = 0
        self.commit()

    def spend(self, doing: Doing, seconds: float) -> None:
        self.page.write(doing, self.now_s)
        self.now_s += seconds

    def commit(self) -> None:
        self.step += 1
        self.page.committed(self.step, 0.1, None, self.now_s)

    def steps(self, count: int, *, data_s: float = 0.0, compute_s: float = 0.05, wait_s: float = 0.03) -> Beat:
        """`count` steps, each with 0.02 s in the optimizer, 0.004 s of them for a copy, and 0.01 s in a snapshot."""
        for _ in range(count):
            self.now_s += data_s
            self.page.waited(data_s=data_s)
            self.now_s += compute_s
            self.spend(Doing.EXCHANGING, wait_s)
            self.spend(Doing.APPLYING, 0.02)
            self.page.waited(stall_s=0.004)
            self.commit()
            self.spend(Doing.SAVING, 0.01)
            self.page.write(Doing.COMPUTING, self.now_s)
        return self.page.read()


def test_the_parts_of_a_step_are_what_the_marks_say_and_sum_to_it() -> None:
    worker = Worker()
    before, began_s = worker.page.read(), worker.now_s
    after = worker.steps(5, data_s=0.007)
    found = parts(before, after, worker.now_s - began_s, gpu=False)
    assert found == StepParts(
        step_s=0.117, data_s=0.007, compute_s=0.05, collectives_s=0.03, optimizer_s=0.016, snapshot_s=0.014
    )
    assert own_s(found) == pytest.approx(0.073)


def test_on_a_gpu_only_what_holds_up_the_host_is_measured() -> None:
    worker = Worker()
    before = worker.page.read()
    found = parts(before, worker.steps(5, data_s=0.007), 1.0, gpu=True)
    assert found is not None
    assert (found.compute_s, found.collectives_s, found.optimizer_s) == (None, None, None)
    assert (found.data_s, found.snapshot_s) == (0.007, 0.014)
    assert own_s(found) is None


def test_a_span_of_two_generations_or_without_a_step_has_no_parts() -> None:
    worker = Worker()
    before = worker.page.read()
    assert parts(before, before, 1.0, gpu=False) is None
    worker.page.place(2, 0)
    assert parts(before, worker.steps(3), 1.0, gpu=False) is None


def windows(times: StepTimes, workers: dict[int, Worker], count: int, **compute_s: float) -> None:
    """`count` windows; `compute_s`: of worker w1, w2, …"""
    now_s = 0.0
    for _ in range(count):
        times.look({w: worker.page.read() for w, worker in workers.items()}, now_s)
        now_s += WINDOW_S
        for w, worker in workers.items():
            worker.steps(50, compute_s=compute_s[f"w{w}"])
    times.look({w: worker.page.read() for w, worker in workers.items()}, now_s)


def test_a_rank_is_named_slow_after_three_windows_and_no_longer_in_the_next_generation() -> None:
    times, workers = StepTimes("a", WINDOW_S, gpu=False), {1: Worker(0), 2: Worker(1), 3: Worker(2)}
    windows(times, workers, 2, w1=0.05, w2=0.15, w3=0.05)
    assert times.slow == ()
    windows(times, workers, 3, w1=0.05, w2=0.15, w3=0.05)
    assert [(s.rank, s.node) for s in times.slow] == [(1, "a")]
    assert times.slow[0].ratio == pytest.approx(0.166 / 0.066, abs=0.02)
    times.look({w: Worker(w - 1, generation=2).page.read() for w in workers}, 1000.0)
    assert times.slow == ()


def test_rows_get_the_parts_of_their_worker() -> None:
    times, workers = StepTimes("a", WINDOW_S, gpu=False), {1: Worker(0), 2: Worker(1)}
    windows(times, workers, 1, w1=0.05, w2=0.06)
    rows = tuple(RankRow(rank=w - 1, node="a", slot=w, pid=w, phase="", step=1, incarnation=w) for w in (1, 2, 3))
    found = [row.parts.compute_s if row.parts else None for row in times.with_parts(rows)]
    assert found == [0.05, 0.06, None]


def test_a_window_lasts_until_each_rank_has_made_some_steps() -> None:
    times, worker = StepTimes("a", WINDOW_S, gpu=False), Worker()
    times.look({1: worker.page.read()}, 0.0)
    times.look({1: worker.steps(2)}, 2 * WINDOW_S)
    row = RankRow(rank=0, node="a", slot=0, pid=1, phase="", step=1, incarnation=1)
    assert times.with_parts((row,))[0].parts is None
    times.look({1: worker.steps(1)}, 3 * WINDOW_S)
    assert times.with_parts((row,))[0].parts is not None


def test_the_time_in_which_no_step_is_made_does_not_lengthen_those_that_were() -> None:
    times, worker = StepTimes("a", WINDOW_S, gpu=False), Worker()
    row = RankRow(rank=0, node="a", slot=0, pid=1, phase="", step=1, incarnation=1)
    times.look({1: worker.page.read()}, 0.0)
    times.look({1: worker.steps(9)}, 0.99)
    for now_s in (WINDOW_S, 20 * WINDOW_S):  # it stands still
        times.look({1: worker.page.read()}, now_s)
        assert times.with_parts((row,))[0].parts is None
    times.look({1: worker.steps(1)}, 20 * WINDOW_S + 0.1)  # the step that took so long is done
    found = times.with_parts((row,))[0].parts
    assert found is not None
    assert found.step_s == pytest.approx((20 * WINDOW_S + 0.1) / 10)


def test_two_ranks_can_be_told_apart_and_one_alone_is_never_slow() -> None:
    assert slow_ranks([{0: 0.1, 1: 0.2}] * 3) == [(1, 2.0)]
    assert slow_ranks([{0: 9.0}] * 3) == []


def test_a_rank_that_was_slow_in_two_of_three_windows_is_not_named() -> None:
    slow, even = {0: 0.1, 1: 0.2}, {0: 0.1, 1: 0.1}
    assert slow_ranks([slow, even, slow]) == []
    assert slow_ranks([even, slow, slow, slow]) == [(1, 2.0)]
    assert slow_ranks([slow, slow]) == []


def test_differences_of_microseconds_make_no_rank_slow() -> None:
    assert slow_ranks([{0: 0.0001, 1: 0.0009}] * 3) == []


OWN = st.dictionaries(st.integers(0, 9), st.floats(0.0, 100.0), max_size=8)


@given(st.lists(OWN, max_size=5))
def test_a_named_rank_was_slower_than_at_least_half_of_the_others_each_time(seen: list[dict[int, float]]) -> None:
    for rank, ratio in slow_ranks(seen):
        assert ratio >= SLOWER
        for window in seen[-3:]:
            others = [s for r, s in window.items() if r != rank]
            assert sum(window[rank] > s for s in others) * 2 >= len(others)
