"""The goodput ledger: every millisecond of every rank is in one bucket, and in the right one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.records.ledger import UNCOUNTED_MS, Bucket, Ledger, Seen, advance, shares

SEEN = st.builds(
    Seen,
    bucket=st.sampled_from(Bucket),
    ranks=st.integers(0, 9),
    step=st.integers(0, 6),
    broken=st.booleans(),
    counted=st.booleans(),
)
TURNS = st.lists(st.tuples(SEEN, st.integers(-500, 90_000), st.integers(-5, 2_000)), max_size=30)


@given(TURNS)
def test_ledger_sums_to_the_time_of_all_ranks_and_no_bucket_shrinks_but_what_was_an_import(
    turns: list[tuple[Seen, int, int]],
) -> None:
    ledger, before, now_ms, wall_ms, ranks_ms = Ledger(until_ms=0), Seen(Bucket.WAITING, 2), 0, 0, 0
    for after, step_ms, stall_ms in turns:
        passed_ms = max(0, now_ms + step_ms - max(ledger.until_ms, 0))
        now_ms += step_ms
        known, ledger = ledger, advance(ledger, before, after, now_ms, stall_ms)
        wall_ms += passed_ms
        ranks_ms += passed_ms * before.ranks
        assert (ledger.wall_ms, ledger.total_ms) == (wall_ms, ranks_ms)
        called = after.counted and not before.counted
        shrunk_ms = {name: spent - ledger.ranks_ms.get(name, 0) for name, spent in known.ranks_ms.items()}
        assert {name for name, ms in shrunk_ms.items() if ms > 0} <= ({"stepping"} if called else set())
        assert 0 <= ledger.plain_ms <= ledger.ranks_ms.get("stepping", 0)
        assert ledger.open_ms >= 0
        assert ledger.step >= known.step
        assert sum(shares(ledger).values()) == pytest.approx(1.0 if ranks_ms else 0.0)
        before = after


def played(*turns: tuple[Seen, int], stall_ms: int = 0) -> dict[str, int]:
    """Bucket -> ms, after each of `turns`: what was seen, and for how many ms it lasted."""
    ledger, now_ms = Ledger(until_ms=0), 0
    for (before, lasted_ms), (after, _) in zip(turns, [*turns[1:], turns[-1]], strict=True):
        now_ms += lasted_ms
        ledger = advance(ledger, before, after, now_ms, stall_ms)
    return {**ledger.ranks_ms, **({"open": ledger.open_ms} if ledger.open_ms else {})}


def stepping(step: int, **more: bool) -> Seen:
    return Seen(Bucket.STEPPING, 2, step, **more)


def test_time_since_the_last_commit_is_training_if_the_step_is_committed() -> None:
    assert played((stepping(4), 100), (stepping(4), 100), (stepping(5), 30)) == {"stepping": 400, "open": 60}


def test_time_since_the_last_commit_is_detection_if_the_generation_fails() -> None:
    aborting = Seen(Bucket.ABORT, 2, 5, broken=True)
    forming, syncing = Seen(Bucket.FORM, 2, 5), Seen(Bucket.SYNC, 2, 5)
    told = played((stepping(4), 100), (stepping(5), 30), (aborting, 7), (forming, 9), (syncing, 11), (stepping(5), 0))
    assert told == {"stepping": 200, "detect": 60, "abort": 14, "form": 18, "sync": 22}


def test_time_since_the_last_commit_is_no_detection_in_a_planned_change() -> None:
    assert played((stepping(4), 30), (Seen(Bucket.FORM, 2, 4), 5), (stepping(4), 0)) == {"form": 70}


def test_lost_steps_are_redone_up_to_the_highest_step_and_train_from_there_on() -> None:
    lost = Seen(Bucket.FORM, 2, 6)
    again = (stepping(4), 10), (stepping(5), 10), (stepping(6), 10), (stepping(7), 0)
    assert played((stepping(5), 10), (stepping(6), 0), (lost, 10), *again) == {"stepping": 40, "form": 20, "redo": 40}


def test_several_steps_between_two_looks_are_split_between_redo_and_training() -> None:
    assert played((stepping(6), 0), (Seen(Bucket.FORM, 2, 6), 0), (stepping(4), 40), (stepping(8), 0)) == {
        "redo": 40, "stepping": 40,
    }  # fmt: skip


def test_a_snapshot_takes_its_time_out_of_the_step_and_never_more_than_it_has() -> None:
    assert played((stepping(4), 100), (stepping(5), 0), stall_ms=30) == {"checkpoint": 60, "stepping": 140}
    assert played((stepping(4), 100), (stepping(5), 0), stall_ms=300) == {"checkpoint": 200}


def test_a_plain_script_trains_once_it_has_run_for_a_while_and_was_importing_if_it_then_calls_elastic() -> None:
    plain = stepping(0, counted=False)
    assert played((plain, 100), (plain, UNCOUNTED_MS), (plain, 0)) == {"stepping": 2 * (UNCOUNTED_MS + 100)}
    assert played((plain, 100), (Seen(Bucket.FORM, 2, broken=True, counted=False), 0)) == {"stepping": 200}
    assert played((plain, 100), (Seen(Bucket.SETUP, 2), 5), (stepping(0), 0)) == {"setup": 210}


def test_a_script_that_fails_before_it_calls_elastic_was_importing_all_along() -> None:
    plain, failed = stepping(0, counted=False), Seen(Bucket.FORM, 2, broken=True, counted=False)
    turns = (plain, UNCOUNTED_MS), (failed, 5), (plain, 100), (Seen(Bucket.SETUP, 2), 7), (stepping(0), 0)
    assert played(*turns) == {"form": 10, "setup": 2 * (UNCOUNTED_MS + 107)}


def test_steps_that_an_earlier_agent_has_counted_stay_goodput_when_the_next_one_learns_what_the_script_is() -> None:
    turns = (stepping(4), 100), (stepping(5), 0), (Seen(Bucket.SETUP, 2, 5, counted=False), 10)
    assert played(*turns, (stepping(5), 0)) == {"stepping": 200, "setup": 20}


def test_stepping_counts_the_step_under_way_and_shares_are_unknown_before_any_time_has_passed() -> None:
    ledger = Ledger(until_ms=0, ranks_ms={"stepping": 60, "sync": 20, "setup": 10}, open_ms=10)
    assert shares(ledger)["stepping"] == 0.7
    assert list(shares(ledger)) == ["stepping", "sync", "setup"], "in the order of Bucket"
    assert shares(Ledger(until_ms=0)) == {}
