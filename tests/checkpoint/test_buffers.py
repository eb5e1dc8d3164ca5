"""The buffers of one rank: which one is filled next, and how a copy begins and ends. The GPU is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.ckpt import filled, state_at, table_of
from support.fake_cuda import Device, gpu  # noqa: F401 - a fixture

from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.memory.buffers import Buffers


@pytest.fixture
def buffers(gpu: Device) -> Iterator[Buffers]:  # noqa: F811
    nbytes = arena_nbytes(table_of(state_at(1)))
    buffers = Buffers()
    buffers.replace([Arena.create(nbytes), Arena.create(nbytes)])
    yield buffers
    buffers.replace(())


def begin(buffers: Buffers, on: Device) -> list[torch.Tensor]:
    tensors = [on.tensor(tensor) for tensor in state_at(7).values()]
    buffers.arenas[0].layout(table_of(state_at(7)))
    assert not buffers.begin(0, tensors, volatile=())
    return tensors


def test_the_free_buffer_with_the_oldest_snapshot_is_next(buffers: Buffers) -> None:
    with filled(state_at(9), step=9) as newer, filled(state_at(8), step=8) as older:
        buffers.replace([newer, older])
        assert buffers.free() == 1
        buffers.busy.add(1)
        assert buffers.free() == 0
        buffers.busy.add(0)
        assert buffers.free() is None


def test_after_a_torn_copy_the_stream_waits_for_the_next_ones(buffers: Buffers, gpu: Device) -> None:  # noqa: F811
    torn = begin(buffers, gpu)
    assert "main waits" not in gpu.log
    torn[0].add_(torch.ones(1))
    assert buffers.finish() == 0
    begin(buffers, gpu)
    assert "main waits" in gpu.log


def test_a_dropped_gpu_copy_is_still_to_be_finished(buffers: Buffers, gpu: Device) -> None:  # noqa: F811
    begin(buffers, gpu)
    assert buffers.copying
    assert buffers.drop()
    assert buffers.finish() == 0
    assert not buffers.drop()
