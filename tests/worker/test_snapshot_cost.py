"""What a snapshot costs the job: all ranks wait for the one whose copy takes longest."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from support.arenas import NoBackend
from support.forming import formed
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.checkpoint.interval import IntervalRule
from elastic.worker.snapshots import checkpoint_scheduler
from elastic.worker.snapshots.agent_snapshots import SnapshotPart
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.snapshots.snapshot_policy import SnapshotCost
from elastic.worker.state.state import State

STEP_S = 0.5
LITTLE_S, MUCH_S = 0.001, 0.05


class Copies(NoBackend):
    def __init__(self, cost_s: float) -> None:
        self.copying, self.beside_s = True, cost_s
        self.kept: list[SnapshotPart] = []

    def put(self, part: SnapshotPart) -> bool:
        self.kept.append(part)
        return True


def kept_by(rank: int, world_size: int, port: int, *, costs_s: list[float], cold_until: int = 0) -> list[Any]:
    """[seconds between the last two snapshots, what status says of them], by a clock of the test's own."""
    group = formed(rank, world_size, port)
    now = [0.0]
    checkpoint_scheduler.time = types.SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[attr-defined]
    backend = Copies(costs_s[rank])
    scheduler = CheckpointScheduler(backend, None, shared=True, snapshots=True)
    state = State(model=torch.nn.Linear(2, 2))
    scheduler.enter(RankPosition(rank, world_size, 0, 1), 0)
    for step in range(200):
        now[0] += STEP_S
        backend.beside_s = costs_s[rank] * (100 if step < cold_until and rank else 1)
        state.committed(1)
        scheduler.after(state)
    group.close()
    before, last = (part.step for part in backend.kept[-2:])
    return [STEP_S * (last - before), backend.kept[-1].kept]


@pytest.mark.parametrize("costs_s", [[LITTLE_S, MUCH_S], [MUCH_S, LITTLE_S]], ids=["rank 1", "rank 0"])
def test_the_rank_that_measures_most_decides_how_often(costs_s: list[float]) -> None:
    for apart_s, told in run_ranks(kept_by, world_size=2, costs_s=costs_s):
        assert apart_s == 20.0
        assert told == "20 s (cost 0.050 s)"


def test_a_copy_that_costs_little_is_made_each_second() -> None:
    for apart_s, told in run_ranks(kept_by, world_size=2, costs_s=[LITTLE_S, LITTLE_S]):
        assert apart_s == 1.0
        assert told == "1 s (cost 0.001 s)"


def test_a_copy_into_fresh_memory_on_another_rank_does_not_count() -> None:
    for apart_s, _ in run_ranks(kept_by, world_size=2, costs_s=[LITTLE_S, LITTLE_S], cold_until=2):
        assert apart_s == 1.0


def test_a_new_rank_0_goes_by_what_the_others_have_measured() -> None:
    cost = SnapshotCost()
    assert (cost.seconds, cost.warm, cost.own_us) == (None, False, 0)
    cost.add(2.0)
    cost.add(1.5)
    assert (cost.seconds, cost.warm, cost.own_us) == (1.5, False, 0), "one into each of the two fresh buffers"
    cost.exchanged(100_000)
    assert (cost.seconds, cost.warm) == (pytest.approx(0.1), True)
    cost.add(0.2)
    assert (cost.seconds, cost.own_us) == (pytest.approx(0.2), 200_000)
    cost.exchanged(300_000)
    assert cost.seconds == pytest.approx(0.3)
    cost.enter()
    assert cost.seconds == pytest.approx(0.2), "that rank may have left"


def of(*copies_s: float) -> SnapshotCost:
    cost = SnapshotCost()
    for seconds in copies_s:
        cost.add(seconds)
    return cost


def test_one_copy_of_a_machine_that_stood_still_does_not_make_snapshots_rare() -> None:
    usual = (0.02, 0.02, 0.005, 0.005, 0.005)
    assert of(*usual).seconds == pytest.approx(0.005)
    assert 0.0 < (of(*usual, 60.0).seconds or 0.0) < 0.015
    for first in range(3):
        assert (of(*(60.0 if i == first else 0.005 for i in range(3))).seconds) == pytest.approx(0.005)


def test_copies_that_become_slower_for_good_count_in_full_soon() -> None:
    assert of(0.005, 0.005, 0.005, *[1.0] * 25).seconds == pytest.approx(1.0, rel=0.05)
    assert of(0.0, 0.0, 0.0, *[1.0] * 25).seconds == pytest.approx(1.0, rel=0.05)


def test_first_copies_of_a_generation_are_not_averaged_in() -> None:
    cost = of(0.02, 0.02, 0.005, 0.005)
    cost.enter()
    cost.add(3.0)
    cost.add(3.0)
    assert (cost.seconds, cost.warm) == (pytest.approx(0.005), True)
    cost.add(0.006)
    assert 0.005 < (cost.seconds or 0.0) < 0.006


class Asked(Copies):
    """Its node is asked for a checkpoint now and then."""

    asked = False

    def wanted(self) -> bool:
        asked, self.asked = self.asked, False
        return asked


def saved_by(rank: int, world_size: int, port: int) -> list[int]:
    """Steps saved after second 50, in which rank 0 is replaced; then its node is asked for a checkpoint."""
    group = formed(rank, world_size, port)
    now = [0.0 if rank else 50.0]
    checkpoint_scheduler.time = types.SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[attr-defined]
    backend = Asked(LITTLE_S)
    scheduler = CheckpointScheduler(backend, IntervalRule(every_s=60.0), shared=True)
    state = State(model=torch.nn.Linear(2, 2))
    now[0] = 50.0
    scheduler.enter(RankPosition(rank, world_size, 0, 1, planner=1), 0)
    for step in range(40):
        now[0] += 1.0
        backend.asked = backend.asked or (step == 30 and rank == 0)
        state.committed(2)
        scheduler.after(state)
    group.close()
    return [part.step for part in backend.kept]


def test_a_replaced_rank_0_does_not_put_off_a_checkpoint_and_what_its_node_is_asked_is_done() -> None:
    first, second = run_ranks(saved_by, world_size=2)
    assert first == second
    due, asked = first
    assert 10 <= due <= 13, "a minute after the one before, which rank 0 does not know of"
    assert 31 < asked <= 34
