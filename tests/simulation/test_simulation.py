"""Random histories of whole clusters: see `cluster`, `judge` and `histories`."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator

import pytest
import structlog
from simulation.histories import History, draw, family, late, leaving, play, starving
from simulation.run import PROCESSES, explain, many, silent

from elastic.contract.records.job_records import Phase

HISTORIES = 10_000
FEW = 400
"""In `make test`; all of them in `make soak`."""
FAMILIES = 400
LATE = 100
LEAVING = 300
STARVING = 300
SHARE = 3
"""In `make test` every third of the families and of the late ones."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [FEW, pytest.param(HISTORIES, marks=pytest.mark.long)])
def test_every_promise_is_kept_in_all_histories(count: int) -> None:
    first = int(os.environ.get("ELASTIC_SEED", "0"))
    print(f"ELASTIC_SEED={first}")
    phases: collections.Counter[Phase] = collections.Counter()
    longest = generations = 0
    for outcome in many(range(first, first + count), processes=1 if count == FEW else PROCESSES):
        if outcome.failure:
            pytest.fail(explain(outcome))
        phases[outcome.phase] += 1
        longest, generations = max(longest, outcome.events), generations + outcome.generations
    # The histories are worth something: they are long, they re-form, and jobs end in every way.
    assert longest >= 200
    assert generations > 1.5 * count
    assert {Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED} <= set(phases)


@pytest.mark.parametrize("share", [SHARE, pytest.param(1, marks=pytest.mark.long)])
def test_every_promise_is_kept_in_the_histories_that_are_seldom_drawn(share: int) -> None:
    for drawn, count in ((family, FAMILIES), (late, LATE), (leaving, LEAVING), (starving, STARVING)):
        for outcome in many(range(0, count, share), drawn=drawn, processes=1 if share == SHARE else PROCESSES):
            if outcome.failure:
                pytest.fail(explain(outcome))


def test_an_order_to_stop_that_comes_too_late_costs_no_step() -> None:
    """The leader stands still while it publishes that a node leaves, and all ranks have passed the step by then. The
    node that leaves could be the only one that has committed the step under way."""
    assert play(draw(56051)).failure == ""


def test_a_node_without_a_place_hands_over_its_state_if_no_other_is_left() -> None:
    """It was excluded and has handed over; then all workers of the others die, and no snapshot or checkpoint exists.
    What it still has is old, and newer than the beginning."""
    assert play(draw(1506280)).failure == ""


def test_a_job_that_is_done_ends_though_etcd_has_lost_what_its_leader_published_last() -> None:
    """The view comes back with what another agent has written back, at no lower a revision."""
    outcome = play(draw(1504928))
    assert (outcome.failure, outcome.phase) == ("", Phase.SUCCEEDED)


@pytest.mark.parametrize(
    ("drawn", "seed"),
    [
        pytest.param(starving, 146, id="it is back, and the generation in its place is on its way"),
        pytest.param(draw, 193, id="who comes back to etcd knows it to be dead, and made a step a moment ago"),
        pytest.param(draw, 2510, id="etcd was away, and hides who is absent"),
    ],
)
def test_the_loss_of_a_node_that_halts_the_job_is_told_once(drawn: Callable[[int], History], seed: int) -> None:
    assert play(drawn(seed)).failure == ""


def test_a_history_is_the_same_each_time() -> None:
    """A printed seed is enough to see a failure again."""
    for seed in range(40, 60):
        assert play(draw(seed)) == play(draw(seed))


def test_a_node_that_joined_as_another_left_does_not_begin_anew_while_that_one_has_the_state() -> None:
    """The joining node leads alone after a death, and the progress record does not show the step before the change."""
    assert play(draw(919062492)).failure == ""


def test_who_is_away_from_etcd_during_a_planned_change_lets_go_of_the_step_after_it() -> None:
    """It hears of the change together with the generation that was formed without it meanwhile."""
    assert play(draw(411649053)).failure == ""


def test_a_job_whose_lower_minimum_was_lost_with_etcds_data_goes_on_with_the_nodes_that_it_had_before() -> None:
    """One of them is drained: it is given back, as a person would do who reads that the job waits for it."""
    assert play(draw(484060549)).failure == ""
