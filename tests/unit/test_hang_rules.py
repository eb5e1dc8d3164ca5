"""Which worker is called hung: one that another rank waits for, and never all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic.contract.job.spec import Hang
from elastic.contract.records.reasons import Code, codes, reason
from elastic.contract.worker.beat import WITH_OTHERS, Beat, Doing
from elastic.recovery.hangs.hang_rules import (
    FARTHEST,
    IN_EXCHANGE,
    RankWait,
    Unhealthy,
    busy,
    judge,
    patience_s,
    patience_there_s,
    position,
    waits_too_long,
)

RULES = Hang(floor_s=2.0, ceiling_s=300.0, factor=10.0)
WAITERS = tuple(WITH_OTHERS)
OTHERS = (Doing.STARTING, Doing.COMPUTING, Doing.APPLYING, Doing.SAVING, Doing.QUIET)
OWN_WORK = (Doing.COMPUTING, Doing.APPLYING, Doing.QUIET)
AT_S = 1000.0
"""The last sign of progress in these tests."""
AHEAD = (RankWait((3, 40, 2), AT_S),)
"""Another rank waits for the sums of step 40."""


def beat(doing: Doing, *, step_s: float = 0.5, quiet_until_s: float = 0.0, **more: float) -> Beat:
    return replace(
        Beat(
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
        ),
        **more,
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


def test_before_the_first_commit_of_a_generation_the_ceiling_holds() -> None:
    """A survivor opens its data anew, logs in, compiles: its step time says nothing of that."""
    entered = beat(Doing.COMPUTING, step_s=0.05, committed_in=2)
    assert judge(entered, "S", AHEAD, RULES, AT_S + 299.9) is None
    assert judge(entered, "S", AHEAD, RULES, AT_S + 300.0) is not None


def test_a_rank_in_the_setup_of_a_formed_group_is_behind_those_that_wait_in_the_hand_over() -> None:
    waits = RankWait(position(beat(Doing.SYNCING)), AT_S)
    sets_up = beat(Doing.STARTING, step_s=0.05, committed_in=2)
    assert judge(sets_up, "S", [waits], RULES, AT_S + 299.9) is None
    assert judge(sets_up, "S", [waits], RULES, AT_S + 300.0) is not None
    assert judge(beat(Doing.SYNCING), "S", [RankWait(position(sets_up), AT_S)], RULES, AT_S + 900.0) is None
    assert busy(sets_up, RULES, AT_S + 299.0)


def test_the_copy_of_a_snapshot_has_the_ceiling_since_its_last_byte() -> None:
    saving = beat(Doing.SAVING, step_s=0.05, beat_at_s=AT_S + 100.0)
    assert judge(saving, "S", AHEAD, RULES, AT_S + 399.9) is None
    assert judge(saving, "S", AHEAD, RULES, AT_S + 400.0) is not None


@pytest.mark.parametrize("doing", OWN_WORK, ids=lambda d: d.name)
def test_a_rank_that_keeps_another_waiting_is_hung_when_its_patience_is_over(doing: Doing) -> None:
    assert judge(beat(doing), "S", AHEAD, RULES, AT_S + 4.999) is None
    assert judge(beat(doing), "S", AHEAD, RULES, AT_S + 5.0) is not None


@pytest.mark.parametrize("doing", OTHERS, ids=lambda d: d.name)
def test_without_a_rank_that_waits_none_is_hung(doing: Doing) -> None:
    """An evaluation, a save or a compilation that all ranks are in: nothing is held up."""
    level = RankWait(position(beat(doing)), AT_S)
    for waits in ((), (level,), (RankWait((2, 90, 2), 0.0),)):
        assert judge(beat(doing), "S", waits, RULES, AT_S + 1e9) is None


def test_patience_counts_from_when_the_other_rank_began_to_wait() -> None:
    late = (RankWait((3, 40, 2), AT_S + 100.0),)
    assert judge(beat(Doing.COMPUTING), "S", late, RULES, AT_S + 104.9) is None
    assert judge(beat(Doing.COMPUTING), "S", late, RULES, AT_S + 105.0) is not None


def test_hang_rule_allows_twice_the_gap_of_the_waiting_rank() -> None:
    """All evaluate without saying so; the first took 55 s for it."""
    late = (RankWait((3, 40, 2), AT_S + 55.0, gap_s=55.0),)
    assert judge(beat(Doing.COMPUTING), "S", late, RULES, AT_S + 55.0 + 109.9) is None
    assert judge(beat(Doing.COMPUTING), "S", late, RULES, AT_S + 55.0 + 110.0) is not None


def test_where_the_others_have_returned_from_train_the_ceiling_holds() -> None:
    """One rank writes the final model while the others have nothing left to do."""
    at_end = (RankWait(position(beat(Doing.FINISHING)), AT_S),)
    assert judge(beat(Doing.COMPUTING), "S", at_end, RULES, AT_S + 299.9) is None
    assert judge(beat(Doing.COMPUTING), "S", at_end, RULES, AT_S + 300.0) is not None


@pytest.mark.parametrize("doing", WAITERS, ids=lambda d: d.name)
def test_a_rank_that_waits_for_others_is_innocent_however_long(doing: Doing) -> None:
    here = beat(doing, exchanges=1)
    assert judge(here, "S", (RankWait(position(here), AT_S),), RULES, AT_S + 1e9) is None


@pytest.mark.parametrize("doing", sorted(IN_EXCHANGE), ids=lambda d: d.name)
def test_a_rank_in_an_exchange_that_others_have_left_behind_is_a_suspect(doing: Doing) -> None:
    """Its stack decides: it may wait for a third rank that has not passed on what it was given."""
    behind = beat(doing, exchanges=1, pulse_s=AT_S + 4.9)
    found = judge(behind, "S", (RankWait((3, 41, 2), AT_S),) if doing is not Doing.FINISHING else (), RULES, AT_S + 5.0)
    if doing is Doing.FINISHING:
        found = judge(behind, "S", (RankWait(position(beat(Doing.DONE)), AT_S),), RULES, AT_S + 300.0)
    assert found is not None
    assert not found.certain


def test_a_rank_that_runs_no_python_while_others_have_gone_on_is_hung_whatever_its_stack_shows() -> None:
    """A call keeps the GIL: the main thread stands in the exchange, whose sums have long been there."""
    deaf = beat(Doing.EXCHANGING, exchanges=1, pulse_s=AT_S)
    ahead = (RankWait((3, 41, 2), AT_S),)
    assert judge(deaf, "S", ahead, RULES, AT_S + 4.9) is None
    found = judge(deaf, "S", ahead, RULES, AT_S + 5.0)
    assert found is not None
    assert found.certain
    assert Code.DEAF in codes(found.evidence)
    level = (RankWait((3, 40, 2), AT_S),)
    assert judge(deaf, "S", level, RULES, AT_S + 5.0) is None


def test_hang_rule_is_certain_at_the_ceiling_for_the_only_rank_behind() -> None:
    """Whatever its stack shows: no rank is left that it could wait for."""
    behind = beat(Doing.EXCHANGING, exchanges=1)
    ahead = (RankWait((3, 41, 2), AT_S),)
    for now_s, certain in ((AT_S + 299.0, False), (AT_S + 300.0, True)):
        found = judge(behind, "S", ahead, RULES, now_s, all_ahead=True)
        assert found is not None
        assert found.certain is certain


def test_a_declared_silence_is_respected_and_ends() -> None:
    quiet = beat(Doing.COMPUTING, quiet_until_s=AT_S + 600.0)
    assert judge(quiet, "R", AHEAD, RULES, AT_S + 599.9) is None
    assert judge(quiet, "R", AHEAD, RULES, AT_S + 600.0) is not None


@pytest.mark.parametrize("doing", list(Doing), ids=lambda d: d.name)
def test_a_stopped_process_cannot_wait_for_anybody(doing: Doing) -> None:
    """Neither its doing nor a declared silence clears it, and only the floor is waited for."""
    stopped = beat(doing, step_s=30.0, quiet_until_s=AT_S + 600.0, exchanges=1)
    level = (RankWait(position(stopped), AT_S),)
    assert judge(stopped, "T", level, RULES, AT_S + 1.999) is None
    found = judge(stopped, "T", level, RULES, AT_S + 2.0)
    assert found is not None
    assert Code.STOPPED in codes(found.evidence)


def test_where_all_processes_are_stopped_none_is_hung() -> None:
    """None of them is a rank that waits."""
    assert judge(beat(Doing.COMPUTING), "T", (), RULES, AT_S + 1e9) is None


def test_a_process_held_by_a_debugger_is_not_stopped() -> None:
    assert judge(beat(Doing.EXCHANGING), "t", (), RULES, AT_S + 1e9) is None


def test_the_only_rank_of_a_job_is_hung_at_the_ceiling() -> None:
    """Its state goes with it, and no rank is held up."""
    for state in "SDT":
        assert judge(beat(Doing.COMPUTING), state, (), RULES, AT_S + 299.9, alone=True) is None
        assert judge(beat(Doing.COMPUTING), state, (), RULES, AT_S + 300.0, alone=True) is not None
    quiet = beat(Doing.QUIET, quiet_until_s=AT_S + 600.0)
    assert judge(quiet, "S", (), RULES, AT_S + 599.9, alone=True) is None
    assert judge(beat(Doing.DONE), "S", (), RULES, AT_S + 1e9, alone=True) is None


def test_a_set_up_has_the_ceiling_once_others_are_past_theirs() -> None:
    fresh = beat(Doing.STARTING, step_s=0.0, generation=0, step=0, committed_in=0)
    assert judge(fresh, "R", (), RULES, AT_S + 1e9) is None
    assert judge(fresh, "R", (RankWait(FARTHEST, 0.0),), RULES, AT_S + 299.9) is None
    assert judge(fresh, "R", (RankWait(FARTHEST, 0.0),), RULES, AT_S + 300.0) is not None
    assert judge(fresh, "R", (RankWait(FARTHEST, 0.0, gap_s=200.0),), RULES, AT_S + 399.9) is None


def test_hang_evidence_states_observed_silence_and_patience() -> None:
    found = judge(beat(Doing.COMPUTING), "D", AHEAD, RULES, AT_S + 7.0)
    why = (
        reason(Code.IN_IO),
        reason(Code.OTHERS_WAIT, who="another rank", for_s=7.0),
        reason(Code.PATIENCE, patience_s=5.0),
    )
    silent = reason(Code.NO_PROGRESS, *why, doing="computing", step=40, step_s=0.5, for_s=7.0)
    assert found == Unhealthy(silent, certain=False)


@given(
    step_s=st.floats(0.0, 1000.0),
    floor_s=st.floats(0.1, 100.0),
    over_s=st.floats(0.0, 1000.0),
    factor=st.floats(1.0, 100.0),
)
def test_patience_never_leaves_its_bounds(step_s: float, floor_s: float, over_s: float, factor: float) -> None:
    rules = Hang(floor_s=floor_s, ceiling_s=floor_s + over_s, factor=factor)
    assert floor_s <= patience_s(beat(Doing.COMPUTING, step_s=step_s), rules) <= floor_s + over_s


WAITS = st.lists(
    st.builds(
        RankWait,
        st.tuples(st.integers(2, 4), st.integers(39, 41), st.integers(0, 5)),
        st.floats(AT_S - 100.0, AT_S + 100.0),
        st.floats(0.0, 100.0),
    ),
    max_size=4,
)


@given(
    doing=st.sampled_from(Doing),
    state=st.sampled_from("RSDTtZ"),
    waits=WAITS,
    step_s=st.floats(0.0, 100.0),
    silent_s=st.floats(0.0, 1000.0),
    longer_s=st.floats(0.0, 1000.0),
)
def test_more_silence_never_clears_a_worker(
    doing: Doing, state: str, waits: list[RankWait], step_s: float, silent_s: float, longer_s: float
) -> None:
    it = beat(doing, step_s=step_s)
    if judge(it, state, waits, RULES, AT_S + silent_s) is not None:
        assert judge(it, state, waits, RULES, AT_S + silent_s + longer_s) is not None


RANKS = st.lists(
    st.builds(
        beat,
        st.sampled_from(Doing),
        step_s=st.floats(0.0, 60.0),
        step=st.integers(38, 41),
        generation=st.integers(2, 3),
        committed_in=st.integers(2, 3),
        exchanges=st.integers(0, 3),
        beat_at_s=st.floats(AT_S - 5000.0, AT_S),
        pulse_s=st.sampled_from((0.0, AT_S - 4000.0, AT_S)),
        gap_s=st.floats(0.0, 500.0),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=250)
@given(ranks=RANKS, states=st.lists(st.sampled_from("RSDTTt"), min_size=6, max_size=6))
def test_whatever_the_pages_say_never_all_ranks_are_condemned(ranks: list[Beat], states: list[str]) -> None:
    """Each is judged with all that could be known of the others, and the stack clears none of them."""
    waits = [
        None if state == "T" or it.doing not in WITH_OTHERS - {Doing.WAITING} else RankWait(position(it), it.beat_at_s)
        for it, state in zip(ranks, states, strict=False)
    ]
    condemned = [
        judge(it, states[i], [w for k, w in enumerate(waits) if w and k != i], RULES, AT_S) is not None
        for i, it in enumerate(ranks)
    ]
    assert not all(condemned)


def test_patience_at_a_place_where_the_rank_was_found_hung_before_grows_up_to_the_ceiling() -> None:
    """Six seconds of validation that the script has not declared cost one replacement, not one each time."""
    validates = beat(Doing.COMPUTING, step_s=0.05)
    once = patience_s(validates, RULES)
    assert [patience_there_s(validates, RULES, found) for found in (0, 1, 2)] == [once, 4 * once, 16 * once]
    assert patience_there_s(validates, RULES, 1000) == RULES.ceiling_s


def test_worker_that_cannot_yet_receive_an_abort_counts_as_busy() -> None:
    entered = beat(Doing.COMPUTING, step_s=0.05, committed_in=2)
    assert busy(entered, RULES, AT_S + 299.0)
    assert not busy(entered, RULES, AT_S + 300.0)
    slow = beat(Doing.COMPUTING, step_s=1.0)
    assert busy(slow, RULES, AT_S + patience_s(slow, RULES) - 0.1), "in the script's own code, as long as that may take"
    assert not busy(slow, RULES, AT_S + patience_s(slow, RULES))
    for doing in (Doing.SAVING, Doing.SYNCING, Doing.APPLYING):
        assert busy(beat(doing), RULES, AT_S + 9.9)
        assert not busy(beat(doing), RULES, AT_S + 10.0)
    assert busy(beat(Doing.QUIET, quiet_until_s=AT_S + 60.0), RULES, AT_S + 59.0)
    assert not busy(beat(Doing.EXCHANGING, committed_in=2), RULES, AT_S + 0.1)
    for doing in (Doing.EXCHANGING, Doing.COMPUTING):
        leaves = beat(doing, left_s=AT_S + 1.0)
        assert busy(leaves, RULES, AT_S + 300.9), "it runs `finally` blocks: nothing of the group is touched any more"
        assert not busy(leaves, RULES, AT_S + 301.0)


@pytest.mark.parametrize("doing", [Doing.EXCHANGING, Doing.COMPUTING])
def test_a_rank_that_has_left_its_group_is_not_hung_before_the_ceiling(
    doing: Doing,
) -> None:
    """Its page shows where it was when the group ended. What it runs since, `finally` blocks, has no usual duration."""
    replacement = RankWait((4, -1, 0), AT_S)
    in_group, left = beat(doing, step_s=0.01), beat(doing, step_s=0.01, left_s=AT_S)
    assert judge(in_group, "S", [replacement], RULES, AT_S + RULES.floor_s + 1.0)
    assert judge(left, "S", [replacement], RULES, AT_S + RULES.ceiling_s - 1.0) is None
    assert judge(left, "S", [replacement], RULES, AT_S + RULES.ceiling_s)
    assert judge(left, "T", [replacement], RULES, AT_S + RULES.floor_s), "stopped, it runs nothing"


def test_rank_wait_is_too_long_when_it_exceeds_the_group_timeout() -> None:
    assert waits_too_long(0, beat(Doing.EXCHANGING), 60.0, AT_S + 59.9) is None
    waits = waits_too_long(0, beat(Doing.EXCHANGING), 60.0, AT_S + 60.0)
    assert waits == reason(Code.WAITED, slot=0, for_s=60, doing="exchanging", step=40)
    assert waits_too_long(0, beat(Doing.SYNCING), 60.0, AT_S + 60.0)
    assert waits_too_long(0, beat(Doing.FINISHING), 60.0, AT_S + 60.0)
    assert waits_too_long(0, beat(Doing.EXCHANGING, quiet_until_s=AT_S + 99.0), 60.0, AT_S + 60.0) is None


@pytest.mark.parametrize("doing", sorted(set(Doing) - IN_EXCHANGE))
def test_a_rank_in_no_collective_waits_in_none(doing: Doing) -> None:
    assert waits_too_long(0, beat(doing), 60.0, AT_S + 1e6) is None
