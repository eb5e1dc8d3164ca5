"""The beat page: what a worker writes is what its agent reads."""

from __future__ import annotations

import pytest

from elastic.contract.worker.beat import PAGE_BYTES, BeatPage, Doing


@pytest.fixture
def page() -> BeatPage:
    made = BeatPage(memoryview(bytearray(PAGE_BYTES)))
    made.clear(10.0)
    return made


def test_exchanges_are_counted_from_the_last_commit_on(page: BeatPage) -> None:
    page.place(1, 0)
    page.write(Doing.EXCHANGING, 11.0)
    page.write(Doing.COMPUTING, 12.0)
    page.write(Doing.EXCHANGING, 13.0)
    assert page.read().exchanges == 2
    page.committed(1, 0.5, None, 14.0)
    assert page.read().exchanges == 0


def test_a_generation_is_settled_by_its_first_commit(page: BeatPage) -> None:
    assert not page.read().settled
    page.place(1, 0)
    assert not page.read().settled
    page.committed(1, 0.5, None, 11.0)
    assert page.read().settled
    page.place(2, 0)
    assert not page.read().settled


def test_beat_page_gap_is_the_longest_of_the_current_and_previous_step(page: BeatPage) -> None:
    page.place(1, 0)
    page.committed(1, 0.5, None, 20.0)
    page.committed(2, 0.5, None, 20.5)
    page.committed(3, 0.5, None, 21.0)
    assert page.read().gap_s == 0.5
    page.write(Doing.EXCHANGING, 28.0)
    assert page.read().gap_s == 7.0
    page.committed(4, 7.0, None, 28.1)
    assert page.read().gap_s == 7.0
    page.committed(5, 0.5, None, 28.6)
    page.committed(6, 0.5, None, 29.1)
    assert page.read().gap_s == 0.5


def test_a_wait_for_other_ranks_is_no_gap_of_this_one(page: BeatPage) -> None:
    page.place(1, 0)
    page.committed(1, 0.5, None, 11.0)
    page.committed(2, 0.5, None, 11.0)
    page.committed(3, 0.5, None, 11.0)
    page.write(Doing.EXCHANGING, 11.0)
    page.write(Doing.COMPUTING, 71.0)
    assert page.read().gap_s == 0.0


def test_copied_bytes_are_a_sign_of_progress_and_a_pulse_is_none(page: BeatPage) -> None:
    before = page.read()
    page.pulse(12.0)
    assert (page.read().beats, page.read().beat_at_s, page.read().pulse_s) == (before.beats, before.beat_at_s, 12.0)
    page.copied(13.0)
    page.copied(14.0)
    after = page.read()
    assert (after.beat_at_s, after.doing) == (14.0, before.doing)
    assert after.beats > before.beats


@pytest.mark.parametrize("scribbled", [-1, 99, 2**62])
def test_a_page_that_the_script_has_scribbled_on_can_be_read(scribbled: int) -> None:
    """By a native extension that writes where it should not: its agent has other workers to look after."""
    memory = memoryview(bytearray(PAGE_BYTES))
    page = BeatPage(memory)
    page.clear(10.0)
    memory[:8].cast("q")[0] = scribbled
    assert page.read().doing is Doing.COMPUTING
