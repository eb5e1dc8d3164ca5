"""When the next checkpoint comes, and that all ranks know it in time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.interval import (
    FIRST_S,
    LEAST_S,
    MOST_S,
    PRIOR_MTBF_S,
    IntervalPlan,
    IntervalRule,
    Measured,
    describe,
    first_plan,
    interval_s,
    next_plan,
    snapshot_interval_s,
)

NOTHING = Measured()


def test_fixed_steps_need_no_talk() -> None:
    rule = IntervalRule(every_steps=20)
    assert first_plan(rule, 0) == IntervalPlan(save_at=20)
    assert first_plan(rule, 39) == IntervalPlan(save_at=40)
    assert next_plan(rule, NOTHING, step=40, step_s=1, since_save_s=0) == IntervalPlan(save_at=60)
    assert next_plan(rule, NOTHING, step=41, step_s=1, since_save_s=0, asked=True) == IntervalPlan(save_at=42)
    assert describe(rule, NOTHING) == "20 steps"


def test_checkpoint_interval_in_seconds_becomes_a_save_step_when_due_soon() -> None:
    rule = IntervalRule(every_s=60)
    assert first_plan(rule, 7) == IntervalPlan(agree_at=8)
    # Steps of 0.1 s: the ranks talk every 10 steps.
    assert next_plan(rule, NOTHING, step=100, step_s=0.1, since_save_s=30) == IntervalPlan(save_at=0, agree_at=110)
    assert next_plan(rule, NOTHING, step=400, step_s=0.1, since_save_s=59.5) == IntervalPlan(save_at=405, agree_at=410)
    assert next_plan(rule, NOTHING, step=400, step_s=0.1, since_save_s=99) == IntervalPlan(save_at=401, agree_at=410)


def test_checkpoint_interval_with_slow_steps_is_agreed_every_step() -> None:
    assert next_plan(IntervalRule(every_s=60), NOTHING, step=5, step_s=20, since_save_s=50) == IntervalPlan(
        save_at=6, agree_at=6
    )
    assert next_plan(IntervalRule(every_s=60), NOTHING, step=5, step_s=20, since_save_s=10) == IntervalPlan(
        save_at=0, agree_at=6
    )


def test_asked_is_at_the_next_step() -> None:
    assert next_plan(IntervalRule(), NOTHING, step=5, step_s=0.5, since_save_s=0, asked=True) == IntervalPlan(
        save_at=6, agree_at=7
    )


def test_checkpoint_interval_auto_is_youngs_formula_of_measured_cost() -> None:
    measured = Measured(cost_s=0.2, durable_s=0.7, failures=3, running_s=8 * 3600 - PRIOR_MTBF_S)
    assert interval_s(IntervalRule(), measured) == pytest.approx(math.sqrt(2 * 0.2 * 7200))
    assert describe(IntervalRule(), measured) == "auto: 54 s (cost 0.20 s, a failure every 2.0 h)"
    assert interval_s(IntervalRule(), NOTHING) == FIRST_S


def test_auto_has_bounds() -> None:
    assert interval_s(IntervalRule(), Measured(cost_s=1e-9)) == LEAST_S
    assert interval_s(IntervalRule(), Measured(cost_s=1e9)) == MOST_S
    assert interval_s(IntervalRule(), Measured(cost_s=1e-9, durable_s=40)) == 80


@given(
    every_s=st.floats(0, 100),
    step=st.integers(0, 10**6),
    step_s=st.floats(0, 100),
    since_save_s=st.floats(0, 10**5),
    asked=st.booleans(),
)
def test_a_save_is_never_planned_beyond_the_next_agreement(
    every_s: float, step: int, step_s: float, since_save_s: float, asked: bool
) -> None:
    plan = next_plan(
        IntervalRule(every_s=every_s), NOTHING, step=step, step_s=step_s, since_save_s=since_save_s, asked=asked
    )
    assert plan.agree_at > step
    assert plan.save_at == 0 or step < plan.save_at <= plan.agree_at
    assert not asked or plan.save_at == step + 1


@pytest.mark.parametrize(
    ("cost_s", "warm", "interval_s"),
    [
        (None, True, 1.0),
        (0.001, True, 1.0),
        (0.05, True, 20.0),
        (0.1, True, 40.0),
        (0.2, True, 60.0),  # once a minute costs less than 1/200
        (1.0, True, 200.0),
        (0.01, False, 1.0),
        (0.2, False, 4.0),  # all is at stake
        (2.0, False, 30.0),  # the first copy paid for fresh memory
    ],
)
def test_memory_snapshots_take_less_than_a_hundredth_of_the_time(
    cost_s: float | None, warm: bool, interval_s: float
) -> None:
    assert snapshot_interval_s(cost_s, warm=warm) == pytest.approx(interval_s)
