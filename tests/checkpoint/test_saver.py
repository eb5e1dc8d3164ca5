"""Checkpoints of a script without an agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ckpt import blank, resume, state_at, table_of

from elastic.checkpoint.format.shard_plan import assign_shards
from elastic.checkpoint.saving.saver import ESCALATE_AFTER
from elastic.checkpoint.stored.find import newest_generation, newest_good
from elastic.worker.snapshots.agent_snapshots import SnapshotPart
from elastic.worker.snapshots.local_snapshots import LocalSnapshots


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[LocalSnapshots]:
    saver = LocalSnapshots(str(tmp_path), "job", generation=1, keep=2)
    yield saver
    saver.close()
    saver.close()


def save(saver: LocalSnapshots, step: int) -> bool:
    return put(saver, step, state_at(step), {"lr": 0.1})


def put(
    saver: LocalSnapshots,
    step: int,
    state: dict[str, torch.Tensor],
    extra: dict[str, Any],
    shard: int = 0,
    shards: int = 1,
) -> bool:
    part = SnapshotPart(
        step=step,
        commit_generation=1,
        shard=shard,
        shards=shards,
        table=table_of(state),
        tensors=list(state.values()),
        extra=extra,
        interval="",
    )
    taken = saver.put(part)
    saver.settle()
    return taken


def test_saver_saves_in_background_keeps_two_checkpoints_and_resumes(saver: LocalSnapshots, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        assert save(saver, step)
        saver.wait(20)
    assert saver.saver.last.failing.error is None
    saver.close()
    tensors = blank()
    found = resume(str(tmp_path), "job", lambda info: tensors[info.name])
    assert found is not None
    assert (found.step, found.manifest.extra) == (40, {"lr": 0.1})
    assert set(found.manifest.versions) == {"python", "torch", "elasticd"}
    assert torch.equal(tensors["weight"], state_at(40)["weight"])
    assert sorted(os.listdir(tmp_path)) == ["step-30", "step-40"]
    assert newest_generation(str(tmp_path), "job") == 1
    assert newest_generation(str(tmp_path), "another") == 0


def test_saver_skips_and_counts_a_save_while_one_is_in_flight(saver: LocalSnapshots, tmp_path: Path) -> None:
    assert save(saver, 10)
    pid = saver.saver.writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    skipped = sum(not save(saver, step) for step in (11, 12, 13))
    os.kill(pid, signal.SIGCONT)
    assert skipped >= 2  # the first one may have been done before it was stopped
    saver.wait(20)
    assert saver.saver.last.failing.error is None
    assert newest_good(str(tmp_path), "job") is not None


def test_failures_are_counted_and_said_and_a_success_ends_the_row(tmp_path: Path) -> None:
    blocked = tmp_path / "folder"
    blocked.write_text("in the way")
    saver = LocalSnapshots(str(blocked), "job", generation=1)
    try:
        for step in range(ESCALATE_AFTER):
            assert not saver.saver.last.failing.escalate
            save(saver, step)
            saver.wait(20)
        assert saver.saver.last.failing.count == ESCALATE_AFTER
        assert saver.saver.last.failing.escalate
        assert str(blocked) in str(saver.saver.last.failing.error)
        blocked.unlink()
        save(saver, 9)
        saver.wait(20)
        assert (saver.saver.last.failing.count, saver.saver.last.failing.escalate) == (0, False)
        assert newest_good(str(blocked), "job") is not None
    finally:
        saver.close()


def test_a_larger_state_gets_larger_arenas(saver: LocalSnapshots, tmp_path: Path) -> None:
    assert save(saver, 10)
    saver.wait(20)
    large = {"large": torch.ones(100_000)}
    assert put(saver, 20, large, {})
    saver.wait(20)
    found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert found.step == 20


@pytest.mark.slow
def test_two_ranks_without_a_collective(tmp_path: Path) -> None:
    state = state_at(10)
    table = table_of(state)
    savers = [LocalSnapshots(str(tmp_path), "job", generation=1, rank=rank, world_size=2) for rank in range(2)]
    try:
        for rank, (saver, shard) in enumerate(zip(savers, assign_shards(table, 2), strict=True)):
            assert put(saver, 10, {table[i].name: state[table[i].name] for i in shard}, {"rank": rank}, rank, 2)
        for saver in savers:
            saver.wait(20)
    finally:
        for saver in savers:
            saver.close()
    found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert [shard.extra for shard in found.manifest.shards] == [{"rank": 0}, {"rank": 1}]
