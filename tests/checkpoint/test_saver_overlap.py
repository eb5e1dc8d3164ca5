"""A script without an agent saves from a GPU: written when the copy is whole, not before. No writer process here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.ckpt import state_at, table_of
from support.fake_cuda import Broken, Device, gpu  # noqa: F401 - a fixture

from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving import orders
from elastic.worker.snapshots.checkpoint_scheduler import SnapshotPart
from elastic.worker.snapshots.local_snapshots import LocalSnapshots


class Writer:
    """Takes orders, and looks at the arena as the process would: at once."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def submit(self, order: orders.AnyOrder, arena: Arena | None = None) -> int:
        if not isinstance(order, orders.Forget):
            found = f" weight {float(arena.tensors()['weight'][0, 0])}" if arena else ""
            self.log.append(f"{type(order).__name__} {order.step}{found}")  # type: ignore[union-attr]
        return len(self.log)

    def results(self) -> list[orders.Result]:
        return []

    def close(self) -> None: ...


@pytest.fixture
def saver(tmp_path: Path, gpu: Device) -> Iterator[LocalSnapshots]:  # noqa: F811
    saver = LocalSnapshots(str(tmp_path), "j", generation=1)
    saver._writer.close()
    saver._writer = Writer()  # type: ignore[assignment]
    yield saver
    saver.close()


def part(step: int, tensors: list[torch.Tensor]) -> SnapshotPart:
    return SnapshotPart(
        step=step,
        commit_generation=1,
        shard=0,
        shards=1,
        table=table_of(state_at(step)),
        tensors=tensors,
        extra={},
        interval="",
    )


def log_of(saver: LocalSnapshots) -> list[str]:
    return saver._writer.log  # type: ignore[attr-defined,no-any-return]


def test_saver_writes_a_gpu_copy_once_it_is_settled(saver: LocalSnapshots, gpu: Device) -> None:  # noqa: F811
    held = state_at(7)
    assert saver.put(part(7, [gpu.tensor(t) for t in held.values()]))
    assert saver.copying
    assert log_of(saver) == []
    saver.settle()
    assert not saver.copying
    assert log_of(saver) == ["Write 7 weight 7.0", "Commit 7"]
    saver.settle()
    assert log_of(saver) == ["Write 7 weight 7.0", "Commit 7"], "once"


def test_save_waits_for_the_copy(saver: LocalSnapshots, gpu: Device) -> None:  # noqa: F811
    held = state_at(3)
    assert saver.put(part(3, [gpu.tensor(t) for t in held.values()]))
    assert saver.put(part(4, [gpu.tensor(t) for t in held.values()])) is False, "one buffer"
    assert log_of(saver) == ["Write 3 weight 3.0", "Commit 3"]


def test_saver_fails_a_copy_whose_tensors_changed_and_reports_why(saver: LocalSnapshots, gpu: Device) -> None:  # noqa: F811
    there = {name: gpu.tensor(tensor) for name, tensor in state_at(7).items()}
    saver.put(part(7, list(there.values())))
    there["weight"].add_(torch.ones(1))
    saver.settle()
    assert log_of(saver) == []
    assert saver.failed(7)
    assert "changed while it was copied" in (saver.failing.error or "")


def test_a_device_that_fails_leaves_nothing_to_be_written(saver: LocalSnapshots, gpu: Device) -> None:  # noqa: F811
    held = state_at(7)
    saver.put(part(7, [gpu.tensor(t) for t in held.values()]))
    gpu.broken = True
    with pytest.raises(Broken):
        saver.settle()
    gpu.broken = False
    saver.settle()
    assert log_of(saver) == []
