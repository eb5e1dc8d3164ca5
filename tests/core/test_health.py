"""Which worker is called hung: only one that its own host can convict, and never one that waits for others."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.beat import Beat, Doing
from elastic.core.health import judge, patience_s, waits_too_long
from elastic.core.spec import Hang

RULES = Hang(floor_s=2.0, ceiling_s=300.0, factor=10.0)
WAITERS = (Doing.WAITING, Doing.FORMING, Doing.SYNCING, Doing.EXCHANGING, Doing.DONE)
OTHERS = (Doing.STARTING, Doing.COMPUTING, Doing.APPLYING, Doing.SAVING, Doing.QUIET)
AT_S = 1000.0
"""The last sign of progress in these tests."""


def beat(doing: Doing, *, step_s: float = 0.5, quiet_until_s: float = 0.0) -> Beat:
    return Beat(
        doing=doing,
        generation=3,
        step=40,
        beats=9,
        beat_at_s=AT_S,
        loss=math.nan,
        step_s=step_s,
        quiet_until_s=quiet_until_s,
        rank=1,
        committed_in=3,
    )


@pytest.mark.parametrize(
    ("step_s", "expected_s"),
    [
        (0.0, 300.0),  # no step yet: imports, compilation
        (0.001, 2.0),  # ten step times would be next to nothing
        (0.2, 2.0),  # just the floor
        (0.5, 5.0),
        (30.0, 300.0),  # just the ceiling
        (100.0, 300.0),
    ],
)
def test_patience_is_some_step_times_between_floor_and_ceiling(step_s: float, expected_s: float) -> None:
    assert patience_s(beat(Doing.COMPUTING, step_s=step_s), RULES) == expected_s


@pytest.mark.parametrize("doing", OTHERS, ids=lambda d: d.name)
def test_who_keeps_the_others_waiting_is_hung_when_its_patience_is_over(doing: Doing) -> None:
    assert judge(beat(doing), "S", RULES, AT_S + 4.999) is None
    assert judge(beat(doing), "S", RULES, AT_S + 5.0) is not None


@pytest.mark.parametrize("doing", WAITERS, ids=lambda d: d.name)
def test_who_waits_for_others_is_innocent_however_long(doing: Doing) -> None:
    assert judge(beat(doing), "S", RULES, AT_S + 1e9) is None


def test_before_the_first_step_there_is_time_to_compile() -> None:
    first = beat(Doing.COMPUTING, step_s=0.0)
    assert judge(first, "R", RULES, AT_S + 299.9) is None
    assert judge(first, "R", RULES, AT_S + 300.0) is not None


def test_a_declared_silence_is_respected_and_ends() -> None:
    quiet = beat(Doing.COMPUTING, quiet_until_s=AT_S + 600.0)
    assert judge(quiet, "R", RULES, AT_S + 599.9) is None
    assert judge(quiet, "R", RULES, AT_S + 600.0) is not None


@pytest.mark.parametrize("doing", list(Doing), ids=lambda d: d.name)
def test_a_stopped_process_cannot_wait_for_anybody(doing: Doing) -> None:
    """Neither its doing nor a declared silence clears it, and only the floor is waited for."""
    stopped = beat(doing, step_s=30.0, quiet_until_s=AT_S + 600.0)
    assert judge(stopped, "T", RULES, AT_S + 1.999) is None
    found = judge(stopped, "T", RULES, AT_S + 2.0)
    assert found is not None
    assert "stopped (state T)" in found.evidence


def test_a_process_held_by_a_debugger_is_not_stopped() -> None:
    assert judge(beat(Doing.EXCHANGING), "t", RULES, AT_S + 1e9) is None


def test_the_evidence_says_what_was_seen_and_what_was_allowed() -> None:
    found = judge(beat(Doing.SAVING), "D", RULES, AT_S + 7.0)
    assert found is not None
    assert found.evidence == (
        "no progress for 7.0 s while saving at step 40 in uninterruptible I/O (state D); "
        "its patience is 5.0 s (step time 0.500 s)"
    )


@given(
    step_s=st.floats(0.0, 1000.0),
    floor_s=st.floats(0.1, 100.0),
    over_s=st.floats(0.0, 1000.0),
    factor=st.floats(1.0, 100.0),
)
def test_patience_never_leaves_its_bounds(step_s: float, floor_s: float, over_s: float, factor: float) -> None:
    rules = Hang(floor_s=floor_s, ceiling_s=floor_s + over_s, factor=factor)
    assert floor_s <= patience_s(beat(Doing.COMPUTING, step_s=step_s), rules) <= floor_s + over_s


@given(
    doing=st.sampled_from(Doing),
    state=st.sampled_from("RSDTtZ"),
    step_s=st.floats(0.0, 100.0),
    silent_s=st.floats(0.0, 1000.0),
    longer_s=st.floats(0.0, 1000.0),
)
def test_more_silence_never_clears_anybody(
    doing: Doing, state: str, step_s: float, silent_s: float, longer_s: float
) -> None:
    it = beat(doing, step_s=step_s)
    if judge(it, state, RULES, AT_S + silent_s) is not None:
        assert judge(it, state, RULES, AT_S + silent_s + longer_s) is not None


def test_a_wait_for_others_is_too_long_when_it_outlasts_the_groups_time_out() -> None:
    assert waits_too_long(beat(Doing.EXCHANGING), 60.0, AT_S + 59.9) == ""
    assert "for 60 s (exchanging at step 40)" in waits_too_long(beat(Doing.EXCHANGING), 60.0, AT_S + 60.0)
    assert waits_too_long(beat(Doing.SYNCING), 60.0, AT_S + 60.0)
    assert waits_too_long(beat(Doing.EXCHANGING, quiet_until_s=AT_S + 99.0), 60.0, AT_S + 60.0) == ""


@pytest.mark.parametrize("doing", sorted(set(Doing) - {Doing.EXCHANGING, Doing.SYNCING}))
def test_who_is_in_no_collective_waits_in_none(doing: Doing) -> None:
    assert waits_too_long(beat(doing), 60.0, AT_S + 1e6) == ""
