"""When to take the next checkpoint, and when the ranks agree on that next.

All ranks must copy their part after the same step, so the step is agreed on: at step `agree_at` rank 0 decides and
broadcasts the next `IntervalPlan`, about once a second, from its own clock and the mean duration of its steps since the
last agreement. Between agreements every rank only compares step numbers. A fixed number of steps needs no agreement.

`auto` is Young's interval, τ = √(2·C·M): C is the training time that one checkpoint costs, M the mean time between
failures. Both are measured in the job itself.
"""

from __future__ import annotations

import math

import msgspec

AGREE_EVERY_S = 1.0
"""About how long a request ('checkpoint now') waits at most until all ranks have it."""

FARTHEST_AGREEMENT_STEPS = 100
"""An agreement costs at most as much as the exchange of gradients in each step, so that this is below 1 % of the time.
More would put off checkpoints and requests for long if steps become much slower."""

LATER_AGREEMENT = 8
"""An agreement is put off by up to this part of the steps until it, if a snapshot is due by then."""

PRIOR_MTBF_S = 4 * 3600.0
"""Prior for the mean time between failures: a job that has not failed yet counts as failing once after this long."""

LEAST_S = 1.0
MOST_S = 1800.0
FIRST_S = 30.0
"""The first checkpoint under 'auto' is due after this: before it, the cost is not known."""


SNAPSHOT_SHARE = 1 / 400
"""Fraction of the training time that in-memory snapshots may cost by what the slowest rank measures. As much again may
go unmeasured (ranks that wait for each other, later steps that are slower, the agents' work on the report)."""

SNAPSHOT_MOST_SHARE = 1 / 200
"""The same, where there would be less than one snapshot in SNAPSHOT_WANTED_S otherwise. With what goes unmeasured it is
below 1 %, as `benchmarks/overhead.py` measures it."""

SNAPSHOT_WANTED_S = 60.0
"""Longest interval for the sake of SNAPSHOT_SHARE alone."""

SNAPSHOT_LEAST_S = 1.0
SNAPSHOT_FIRST_SHARE = 1 / 20
SNAPSHOT_FIRST_MOST_S = 30.0
"""Share and longest interval until a copy into already used memory has been measured. The first copies of a process
cost more than those that follow and say little about them; meanwhile all that the job has done is at stake."""


class IntervalRule(msgspec.Struct, frozen=True, kw_only=True):
    """One of two fixed intervals, or, with both at 0, 'auto'."""

    every_steps: int = 0
    every_s: float = 0.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the job."""

    cost_s: float | None = None
    """Training time lost per checkpoint, by blocking and by slowdown until it was durable. None: none taken yet."""
    durable_s: float = 0.0
    """How long a checkpoint takes until it is on disk."""
    failures: int = 0
    """Failures over the job's lifetime, membership changes not counted."""
    running_s: float = 0.0
    """How long the job has been stepping, over its whole lifetime."""


class IntervalPlan(msgspec.Struct, frozen=True, kw_only=True):
    save_at: int = 0
    """Take a snapshot and save it once this step is committed; 0: none before `agree_at`."""

    keep_at: int = 0
    """Take a snapshot that only stays in memory once this step is committed; 0: none before `agree_at`."""
    agree_at: int = 0
    """Agree again once this step is committed; 0: never."""


def interval_s(rule: IntervalRule, measured: Measured) -> float:
    """Seconds between checkpoints; infinite where only steps count."""
    if rule.every_steps:
        return math.inf
    if rule.every_s:
        return rule.every_s
    if measured.cost_s is None:
        return FIRST_S
    mtbf_s = (measured.running_s + PRIOR_MTBF_S) / (measured.failures + 1)
    young_s = math.sqrt(2 * measured.cost_s * mtbf_s)
    # Not so often that one is still being written when the next is due, and at least every MOST_S.
    return min(max(young_s, LEAST_S, 2 * measured.durable_s), MOST_S)


def describe(rule: IntervalRule, measured: Measured) -> str:
    """For `status`: '40 steps', '60 s', 'auto: 76 s (cost 0.20 s, a failure every 4.0 h)'."""
    if rule.every_steps:
        return f"{rule.every_steps} steps"
    if rule.every_s:
        return f"{rule.every_s:g} s"
    if measured.cost_s is None:
        return f"auto: first after {FIRST_S:g} s"
    mtbf_h = (measured.running_s + PRIOR_MTBF_S) / (measured.failures + 1) / 3600
    return f"auto: {interval_s(rule, measured):.0f} s (cost {measured.cost_s:.2f} s, a failure every {mtbf_h:.1f} h)"


def describe_snapshots(cost_s: float | None, *, warm: bool = True) -> str:
    """For `status`: '60 s (cost 0.150 s)'."""
    if cost_s is None:
        return "not measured yet"
    return f"{snapshot_interval_s(cost_s, warm=warm):.0f} s (cost {cost_s:.3f} s)"


def first_plan(rule: IntervalRule | None, step: int, *, snapshots: bool = False) -> IntervalPlan:
    """The plan with which every rank starts a generation at `step`, without agreement. No `rule`: no checkpoints."""
    keep_at = step + 1 if snapshots else 0
    if rule is not None and rule.every_steps:
        return IntervalPlan(save_at=next_multiple(step, rule.every_steps), keep_at=keep_at)
    return IntervalPlan(agree_at=step + 1, keep_at=keep_at)


def snapshot_interval_s(cost_s: float | None, *, warm: bool = True) -> float:
    """Seconds between in-memory snapshots, such that they cost SNAPSHOT_SHARE of the training time, or up to
    SNAPSHOT_MOST_SHARE where that would be less than one in SNAPSHOT_WANTED_S. The first ones are taken sooner.

    `cost_s`: training time that one costs; None: none taken yet. `warm`: measured on already used memory.
    """
    if cost_s is None:
        return SNAPSHOT_LEAST_S
    if not warm:
        return min(max(SNAPSHOT_LEAST_S, cost_s / SNAPSHOT_FIRST_SHARE), SNAPSHOT_FIRST_MOST_S)
    for_its_share_s = min(cost_s / SNAPSHOT_SHARE, SNAPSHOT_WANTED_S)
    return max(SNAPSHOT_LEAST_S, cost_s / SNAPSHOT_MOST_SHARE, for_its_share_s)


def with_snapshot(plan: IntervalPlan, interval_s: float, *, step: int, step_s: float, since_s: float) -> IntervalPlan:
    """Rank 0's `plan`, decided after `step`, with the next in-memory snapshot: `interval_s` after the last one, which
    was `since_s` ago.

    A snapshot is an exchange as well. One that is due shortly after the next exchange replaces it, so that the ranks
    wait for each other once and not twice. Only where steps are short: elsewhere that would put off requests.
    """
    due_at = step + max(1, math.ceil((interval_s - since_s) / max(step_s, 1e-6)))
    latest = plan.agree_at + (plan.agree_at - step) // LATER_AGREEMENT
    if due_at > latest:
        return plan
    return msgspec.structs.replace(plan, keep_at=due_at, agree_at=max(plan.agree_at, due_at))


def next_plan(
    rule: IntervalRule, measured: Measured, *, step: int, step_s: float, since_save_s: float, asked: bool = False
) -> IntervalPlan:
    """The planning rank's decision after committing `step`.

    `step_s`: mean duration of its steps since the last agreement. `since_save_s`: time since the last save was started,
    or since training began. `asked`: a user, or an imminent shutdown, requests one as soon as possible.
    """
    if rule.every_steps:
        return IntervalPlan(save_at=step + 1 if asked else next_multiple(step, rule.every_steps))
    step_s = max(step_s, 1e-6)
    ahead = max(1, min(round(AGREE_EVERY_S / step_s), FARTHEST_AGREEMENT_STEPS))
    due_steps = 1 if asked else max(1, math.ceil((interval_s(rule, measured) - since_save_s) / step_s))
    return IntervalPlan(save_at=step + due_steps if due_steps <= ahead else 0, agree_at=step + ahead)


def next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` after `step`."""
    return (step // every + 1) * every
