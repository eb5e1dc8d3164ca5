"""benchmarks/overhead.py: how it tells the time that snapshots cost from all else that makes steps slow."""

from __future__ import annotations

import sys

import pytest
from support.source import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from _overhead_node import excess

STEP_S, EVERY = 0.05, 40


def steps(extra_s: float) -> tuple[list[float], list[bool]]:
    """Of a machine that becomes slower by a fifth meanwhile; each snapshot costs `extra_s`, spread over two steps."""
    kept = [i % EVERY == 7 for i in range(20 * EVERY)]
    seconds = [STEP_S * (1 + 0.2 * i / len(kept)) for i in range(len(kept))]
    for i, at in enumerate(kept):
        if at:
            seconds[i] += 0.4 * extra_s
            seconds[i + 1] += 0.6 * extra_s
    return seconds, kept


@pytest.mark.parametrize("extra_s", [0.0, 0.005, 0.012])
def test_the_excess_is_what_the_snapshots_cost(extra_s: float) -> None:
    total_s, excess_s, counted, within = excess(*steps(extra_s))
    assert (counted, within) == (18, 18 * EVERY), "all but the first and the last"
    assert excess_s / counted == pytest.approx(extra_s, abs=5e-4)
    without_s = total_s - excess_s
    assert total_s / without_s == pytest.approx(1 + counted * extra_s / without_s, abs=3e-4)


def test_snapshots_too_close_to_have_steps_between_them_count_nothing() -> None:
    assert excess([STEP_S] * 100, [True] * 100) == (0.0, 0.0, 0, 0)
