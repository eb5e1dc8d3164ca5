"""A script without an agent saves from a GPU: written when the copy is whole, not before. No writer process here."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.ckpt import state_at, table_of
from support.fake_cuda import Broken, Device, gpu  # noqa: F401 - a fixture

from elastic.checkpoint.format.errors import ArenaError
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving import orders
from elastic.worker.snapshots.agent_snapshots import SnapshotPart
from elastic.worker.snapshots.local_snapshots import LocalSnapshots


class Writer:
    """Takes orders, and looks at the arena as the process would: at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.answers: list[orders.Result] = []

    def submit(self, order: orders.AnyOrder, arena: Arena | None = None) -> int:
        if not isinstance(order, orders.Forget):
            found = f" weight {float(arena.tensors()['weight'][0, 0])}" if arena else ""
            self.log.append(f"{type(order).__name__} {order.step}{found}")  # type: ignore[union-attr]
        return len(self.log)

    def results(self) -> list[orders.Result]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None: ...


@pytest.fixture
def saver(tmp_path: Path, gpu: Device) -> Iterator[LocalSnapshots]:  # noqa: F811
    saver = LocalSnapshots(str(tmp_path), "j", generation=1)
    saver.saver.writer.close()
    saver.saver.writer = Writer()  # type: ignore[assignment]
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
    return saver.saver.writer.log  # type: ignore[attr-defined,no-any-return]


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
    assert saver.saver.last.failing.last == (1, 7)
    assert "changed while it was copied" in str(saver.saver.last.failing.error)


def test_a_device_that_fails_leaves_nothing_to_be_written(saver: LocalSnapshots, gpu: Device) -> None:  # noqa: F811
    held = state_at(7)
    saver.put(part(7, [gpu.tensor(t) for t in held.values()]))
    gpu.broken = True
    with pytest.raises(Broken):
        saver.settle()
    gpu.broken = False
    saver.settle()
    assert log_of(saver) == []


def test_save_whose_commit_alone_failed_is_known_to_have_failed(saver: LocalSnapshots) -> None:
    """So that the final state is saved once more."""
    saver.put(part(7, list(state_at(7).values())))
    assert not saver.failed(7)
    failed = orders.Result(id=2, kind="Commit", step=7, generation=1, error="no space")
    saver.saver.writer.answers = [orders.Result(id=1, kind="Write", step=7, generation=1), failed]  # type: ignore[attr-defined]
    assert saver.failed(7)
    assert not saver.failed(6)


def test_save_that_is_not_durable_at_the_end_is_said_to_be_lost(
    saver: LocalSnapshots, capfd: pytest.CaptureFixture[str]
) -> None:
    saver.put(part(7, list(state_at(7).values())))
    saver.close()
    saver.close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1, "once"
    assert said.endswith("before it was durable; the one before stays\n")


def test_save_that_has_become_durable_unseen_is_not_said_to_be_lost(
    saver: LocalSnapshots, capfd: pytest.CaptureFixture[str]
) -> None:
    saver.put(part(7, list(state_at(7).values())))
    saver.saver.writer.answers = [orders.Result(id=2, kind="Commit", step=7, generation=1)]  # type: ignore[attr-defined]
    saver.close()
    assert capfd.readouterr().err == ""


ARENA = "elastic.checkpoint.memory.arena.Arena"


@pytest.fixture(params=["os.memfd_create", "os.dup", f"{ARENA}._mapped", f"{ARENA}.layout"])
def scarce(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """No memory, or no descriptor, can be had."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise ArenaError("no memory") if ARENA in request.param else OSError(errno.EMFILE, "Too many open files")

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request.param, refused)
            yield

    return patched


def test_save_without_memory_or_descriptors_is_said_once_to_have_failed(
    saver: LocalSnapshots, scarce: Callable[[], AbstractContextManager[None]], capfd: pytest.CaptureFixture[str]
) -> None:
    with scarce():
        assert not saver.put(part(7, list(state_at(7).values())))
    assert saver.saver.last.failing.count == 1
    assert saver.put(part(8, list(state_at(8).values())))
    assert log_of(saver) == ["Write 8 weight 8.0", "Commit 8"]
    assert capfd.readouterr().err.count("a checkpoint failed") == 1


def test_buffers_that_cannot_be_prepared_are_asked_for_by_the_save(
    saver: LocalSnapshots, scarce: Callable[[], AbstractContextManager[None]]
) -> None:
    with scarce():
        saver.prepare(part(7, list(state_at(7).values())))
        saver._prepared()
    assert saver.put(part(8, list(state_at(8).values())))
