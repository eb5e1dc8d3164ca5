"""Checkpoints of a script without an agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.ckpt import blank, resume, state_at, table_of

from elastic.checkpoint.format.shard_plan import assign_shards
from elastic.checkpoint.saving.saver import ESCALATE_AFTER, LocalSaver, next_generation
from elastic.checkpoint.stored.find import newest_good


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[LocalSaver]:
    saver = LocalSaver(str(tmp_path), "job", generation=1, keep=2)
    yield saver
    saver.close()
    saver.close()


def save(saver: LocalSaver, step: int) -> bool:
    state = state_at(step)
    return saver.save(step, table_of(state), list(state.values()), {"lr": 0.1})


def test_saver_saves_in_background_keeps_two_checkpoints_and_resumes(saver: LocalSaver, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        assert save(saver, step)
        saver.wait(20)
    counts = saver.counts
    assert (counts.started, counts.durable, counts.failed) == (4, 4, 0)
    saver.close()
    tensors = blank()
    found = resume(str(tmp_path), "job", lambda info: tensors[info.name])
    assert found is not None
    assert (found.step, found.manifest.extra) == (40, {"lr": 0.1})
    assert set(found.manifest.versions) == {"python", "torch", "elasticd"}
    assert torch.equal(tensors["weight"], state_at(40)["weight"])
    assert sorted(os.listdir(tmp_path)) == ["step-30", "step-40"]
    assert next_generation(str(tmp_path), "job") == 2
    assert next_generation(str(tmp_path), "another") == 1


def test_saver_skips_and_counts_a_save_while_one_is_in_flight(saver: LocalSaver, tmp_path: Path) -> None:
    assert save(saver, 10)
    pid = saver._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    skipped = sum(not save(saver, step) for step in (11, 12, 13))
    os.kill(pid, signal.SIGCONT)
    assert skipped >= 2  # the first one may have been done before it was stopped
    assert saver.wait(20).skipped == skipped
    assert saver.counts.failed == 0
    assert newest_good(str(tmp_path), "job") is not None


def test_failures_are_counted_and_said_and_a_success_ends_the_row(tmp_path: Path) -> None:
    blocked = tmp_path / "folder"
    blocked.write_text("in the way")
    saver = LocalSaver(str(blocked), "job", generation=1)
    try:
        for step in range(ESCALATE_AFTER):
            assert not saver.counts.failing.escalate
            save(saver, step)
            saver.wait(20)
        assert saver.counts.failed == saver.counts.failing.count == ESCALATE_AFTER
        assert saver.counts.failing.escalate
        assert str(blocked) in (saver.counts.failing.error or "")
        blocked.unlink()
        save(saver, 9)
        saver.wait(20)
        assert (saver.counts.durable, saver.counts.failing.count, saver.counts.failing.escalate) == (1, 0, False)
    finally:
        saver.close()


def test_a_larger_state_gets_larger_arenas(saver: LocalSaver) -> None:
    assert save(saver, 10)
    saver.wait(20)
    large = {"large": torch.ones(100_000)}
    assert saver.save(20, table_of(large), list(large.values()))
    assert saver.wait(20).durable == 2


@pytest.mark.slow
def test_two_ranks_without_a_collective(tmp_path: Path) -> None:
    state = state_at(10)
    table = table_of(state)
    savers = [LocalSaver(str(tmp_path), "job", generation=1, rank=rank, world_size=2) for rank in range(2)]
    try:
        for rank, (saver, shard) in enumerate(zip(savers, assign_shards(table, 2), strict=True)):
            part = tuple(table[i] for i in shard)
            assert saver.save(10, part, [state[info.name] for info in part], {"rank": rank})
        assert [saver.wait(20).durable for saver in savers] == [1, 1]
    finally:
        for saver in savers:
            saver.close()
    found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert [shard.extra for shard in found.manifest.shards] == [{"rank": 0}, {"rank": 1}]
