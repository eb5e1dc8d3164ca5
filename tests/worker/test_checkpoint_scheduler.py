"""When a worker copies which shard of the state, with a backend that only counts."""

from __future__ import annotations

import pytest
import torch
from support.arenas import NoBackend

from elastic.checkpoint.interval import FARTHEST_AGREEMENT_STEPS, IntervalRule
from elastic.worker.snapshots import checkpoint_scheduler
from elastic.worker.snapshots.agent_snapshots import SnapshotPart
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.state import State


class SnapshotBackend(NoBackend):
    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.full = False
        self.refuses = False
        self.failed_steps: set[int] = set()

    def put(self, part: SnapshotPart) -> bool:
        return not self.refuses and super().put(part)

    def failed(self, step: int) -> bool:
        return step in self.failed_steps

    def wanted(self) -> bool:
        asked, self.asked = self.asked, False
        return asked

    def free(self) -> bool:
        return not self.full

    def wait(self, limit_s: float) -> None:
        self.full = False

    def settle(self) -> None:
        raise AssertionError("it said that it had copied all")


def build() -> State:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    return State(model=model)


def run(scheduler: CheckpointScheduler, state: State, steps: int) -> None:
    for _ in range(steps):
        state.committed(1)
        scheduler.after(state)


def test_every_so_many_steps_and_at_the_end() -> None:
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=10), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    run(scheduler, state, 25)
    assert [part.step for part in backend.parts] == [10, 20]
    scheduler.finish(state)
    scheduler.finish(state)
    assert [part.step for part in backend.parts] == [10, 20, 25], "once is enough"


@pytest.mark.parametrize("how", ["not copied", "not written"])
def test_a_final_state_whose_save_has_failed_is_saved_again(how: str) -> None:
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=10), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    backend.refuses = how == "not copied"
    run(scheduler, state, 10)
    backend.refuses = False
    if how == "not written":
        backend.failed_steps = {10}
        assert [part.step for part in backend.parts] == [10]
    backend.parts.clear()
    scheduler.finish(state)
    assert [part.step for part in backend.parts] == [10]


def test_a_checkpoint_that_was_due_and_not_taken_is_taken_as_soon_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(checkpoint_scheduler.time, "monotonic", lambda: now_s)
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_s=600.0), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    for second in range(1, 620):
        now_s = float(second)
        backend.full = 590 < second < 610
        run(scheduler, state, 1)
    assert [610 <= part.step <= 612 for part in backend.parts] == [True]
    assert scheduler.policy.skipped == 1


def test_steps_that_become_much_slower_do_not_put_off_a_checkpoint_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(checkpoint_scheduler.time, "monotonic", lambda: now_s)
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_s=60.0), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    for step in range(2, 1300):
        now_s += 0.0001 if step < 1000 else 1.0
        run(scheduler, state, 1)
    assert backend.parts
    assert backend.parts[0].step < 1000 + 60 + FARTHEST_AGREEMENT_STEPS


def test_a_first_step_that_is_short_does_not_put_off_the_second_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn does after its commit, such as an evaluation, is not in the time of the first step."""
    now_s = 0.0
    monkeypatch.setattr(checkpoint_scheduler.time, "monotonic", lambda: now_s)
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, None, shared=True, snapshots=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    taken = []
    for step in range(1, 11):
        now_s += 0.001
        run(scheduler, state, 1)
        taken += [step] if backend.parts and backend.parts[-1].step == step else []
        now_s += 1.0
    assert taken == [1, *range(3, 11)]  # one each second


def test_a_final_state_that_is_not_saved_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    class Slow(SnapshotBackend):
        waited_s = 0.0

        def wait(self, limit_s: float) -> None:
            self.waited_s = limit_s

    backend, state = Slow(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=10), shared=True, finish_s=600.0)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    run(scheduler, state, 15)
    backend.full = True
    scheduler.finish(state)
    assert [part.step for part in backend.parts] == [10]
    assert backend.waited_s == 600.0
    assert "the final state, of step 15, is not saved: an earlier checkpoint was still" in capfd.readouterr().err


def test_a_final_state_that_was_changed_after_its_commit_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=10), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    run(scheduler, state, 12)
    state.changing()  # as an optimizer's step does
    scheduler.finish(state)
    assert [part.step for part in backend.parts] == [10, 12]
    assert "without job.commit: the checkpoint of step 12 has this change, too" in capfd.readouterr().err
    run(scheduler, state, 1)
    scheduler.finish(state)
    assert capfd.readouterr().err == ""


def test_checkpoint_scheduler_skips_and_counts_a_full_backend() -> None:
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=5), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    backend.full = True
    run(scheduler, state, 12)
    assert (backend.parts, scheduler.policy.skipped) == ([], 2)


def test_requested_checkpoint_is_taken_at_the_next_agreement() -> None:
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=100_000), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    backend.asked = True
    run(scheduler, state, 3)
    assert [part.step for part in backend.parts] == [3]


def test_requested_checkpoint_is_taken_later_if_both_buffers_are_busy() -> None:
    backend, state = SnapshotBackend(), build()
    scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=100_000), shared=True)
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    backend.asked = backend.full = True
    run(scheduler, state, 3)
    assert (backend.parts, scheduler.policy.skipped) == ([], 1)
    backend.full = False
    run(scheduler, state, 3 * FARTHEST_AGREEMENT_STEPS)
    assert len(backend.parts) == 1, "and once is enough"


def test_shards_are_of_the_world_or_of_the_node() -> None:
    state = build()
    for shared, want in ((True, (3, 4)), (False, (1, 2))):
        backend = SnapshotBackend()
        scheduler = CheckpointScheduler(backend, IntervalRule(every_steps=1), shared=shared)
        scheduler.enter(RankPosition(3, 4, 1, 2), 0)
        part = scheduler._part(state, save=True)
        assert (part.shard, part.shards) == want
    whole = [info.name for info in state.table()]
    scheduler = CheckpointScheduler(SnapshotBackend(), IntervalRule(every_steps=1), shared=False)
    names: list[str] = []
    for index in range(2):
        scheduler.enter(RankPosition(index, 4, index, 2), 0)
        names += [info.name for info in scheduler._part(state, save=True).table]
    assert sorted(names) == sorted(whole), "one node's workers hold all of it"
