"""A node that was away for long comes back alone: its own checkpoints are older than the copies at the remote end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.checkpoint.format.layout import arena_nbytes, file_order
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving.write import commit, write_shard
from elastic.checkpoint.stored.remote import copy_up
from elastic.worker.state.handover.restore import Disk, extra_of
from elastic.worker.state.state import State

OLD, NEW = (3, 1000), (5, 900)
"""(generation, step): the job had gone back, and was saved since."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/checkpoints"


def state(value: float) -> State:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return State(model=module)


def saved(directory: Path, version: tuple[int, int]) -> str:
    """A checkpoint whose weight is its step."""
    generation, step = version
    extra: dict[str, object] = {}
    tensors = state(float(step)).tensors(extra)
    table = tuple(info for info, _ in tensors)
    arena = Arena.create(arena_nbytes(table))
    arena.layout(table)
    arena.fill([tensor for _, tensor in tensors]).finish()
    arena.seal(step, generation, extra_of(extra, file_order(table)))
    write_shard(arena, str(directory), "job")
    arena.close()
    return commit(str(directory), "job", step=step, generation=generation, shards=1, world_size=1)


def loaded(disk: Disk) -> float:
    came = state(-1.0)
    disk.load(came)
    return float(came.model.weight.detach())


def test_the_newer_copy_is_offered_and_loaded(tmp_path: Path, url: str) -> None:
    copy_up(saved(tmp_path / "gone", NEW), url)
    saved(tmp_path / "here", OLD)
    disk = Disk(str(tmp_path / "here"), "job", url, known=NEW)
    assert disk.newest()[0] == NEW
    assert loaded(disk) == NEW[1]
    assert Disk(str(tmp_path / "here"), "job", known=NEW).newest()[0] == NEW, "it is here now"


@pytest.mark.parametrize("known", [(0, 0), OLD])
def test_the_remote_end_is_not_asked_if_nothing_newer_is_known(tmp_path: Path, known: tuple[int, int]) -> None:
    saved(tmp_path / "here", OLD)
    disk = Disk(str(tmp_path / "here"), "job", "no-such-protocol://x", known=known)
    assert disk.newest()[0] == OLD
    assert loaded(disk) == OLD[1]


def test_an_older_copy_is_left_where_it_is(tmp_path: Path, url: str) -> None:
    copy_up(saved(tmp_path / "gone", (2, 10)), url)
    saved(tmp_path / "here", OLD)
    disk = Disk(str(tmp_path / "here"), "job", url, known=NEW)
    assert disk.newest()[0] == OLD
    assert loaded(disk) == OLD[1]
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_a_remote_end_that_does_not_answer_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "here", OLD)
    disk = Disk(str(tmp_path / "here"), "job", "no-such-protocol://x", known=NEW)
    assert disk.newest()[0] == OLD
    assert loaded(disk) == OLD[1]
    told = capfd.readouterr().err
    assert f"the checkpoint in {tmp_path / 'here'} is older than that of step 900, which the job has had" in told
    assert "no-such-protocol" in told


def test_a_damaged_copy_does_not_keep_the_older_one_from_being_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/remote"
    copy_up(saved(tmp_path / "gone", NEW), url)
    (shard,) = (tmp_path / "remote").glob("*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    saved(tmp_path / "here", OLD)
    disk = Disk(str(tmp_path / "here"), "job", url, known=NEW)
    assert loaded(disk) == OLD[1]
    assert "no good checkpoint" in capfd.readouterr().err
