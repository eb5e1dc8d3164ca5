"""The interval that the job chose for itself goes with each snapshot, for status to show."""

from __future__ import annotations

import re

import torch
from support.arenas import NoBackend

from elastic.checkpoint.interval import IntervalRule
from elastic.worker.snapshots.agent_snapshots import SnapshotPart
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.state import State


class SnapshotBackend(NoBackend):
    """Asked for a snapshot at every talk; each takes ten minutes until it is on disk."""

    durable_s = 600.0

    def wanted(self) -> bool:
        return True

    def put(self, part: SnapshotPart) -> bool:
        super().put(part)
        return len(self.parts) != 2  # the second one finds no room


def test_checkpoint_scheduler_reports_measured_interval_and_skipped_saves() -> None:
    backend, state = SnapshotBackend(), State(model=torch.nn.Linear(4, 4))
    scheduler = CheckpointScheduler(backend, IntervalRule(), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    for _ in range(100_000):
        state.committed(1)
        scheduler.after(state)
        if len(backend.parts) == 3:
            break
    first, _, third = backend.parts
    assert (first.interval, first.skipped) == ("auto: first after 30 s", 0)
    # Twice what a save takes: that is more than what its cost asks for.
    assert re.fullmatch(r"auto: 1200 s \(cost \d\.\d\d s, a failure every 4\.0 h\)", third.interval)
    assert third.skipped == 1


def test_a_copy_beside_the_steps_has_its_price_too() -> None:
    """A core that the steps lack costs training time, though nobody waits: else auto would save without end."""
    backend, state = SnapshotBackend(), State(model=torch.nn.Linear(4, 4))
    backend.copying, backend.beside_s = True, 100.0
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=1), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    state.committed(1)
    scheduler.after(state)
    scheduler.settle()
    assert scheduler.policy.cost.seconds is not None
    assert scheduler.policy.cost.seconds >= 100.0
