"""Small states of training, arenas over them, and checkpoints of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from elastic.checkpoint.format import files
from elastic.checkpoint.format.dtypes import code_of
from elastic.checkpoint.format.files import REAL, Files
from elastic.checkpoint.format.layout import arena_nbytes
from elastic.checkpoint.format.shard_plan import assign_shards
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.saving.write import commit, write_shard
from elastic.checkpoint.stored.find import READ_THREADS, Found
from elastic.checkpoint.stored.read import Into, load_newest
from elastic.contract.worker.tensor_table import Table, TensorInfo

Tensors = dict[str, torch.Tensor]
PIECE = 4096


def table_of(tensors: Mapping[str, torch.Tensor]) -> Table:
    return tuple(TensorInfo(name, code_of(t.dtype), tuple(t.shape), t.nbytes) for name, t in tensors.items())


def state_at(step: int) -> Tensors:
    """A state that tells its step from every byte of it."""
    return {
        "weight": torch.full((60, 40), float(step)),
        "bias": torch.full((40,), step, dtype=torch.bfloat16),
        "steps": torch.tensor(step),
        "moment": torch.full((60, 40), float(step) + 0.5),
        "nothing": torch.empty(0, 4),
    }


@contextmanager
def filled(
    tensors: Tensors,
    step: int,
    generation: int = 1,
    shard: int = 0,
    shards: int = 1,
    extra: dict[str, Any] | None = None,
) -> Iterator[Arena]:
    """An arena with shard `shard` of `tensors`, sealed."""
    table = table_of(tensors)
    mine = assign_shards(table, shards)[shard]
    part = tuple(table[i] for i in mine)
    arena = Arena.create(arena_nbytes(part))
    try:
        arena.layout(part, shard=shard, shards=shards)
        arena.fill([tensors[info.name] for info in part])
        arena.seal(step, generation, extra)
        yield arena
    finally:
        arena.close()


@contextmanager
def on(disk: Files) -> Iterator[None]:
    """Instead of the real file system."""
    with mock.patch.object(files, "REAL", disk):
        yield


def save(
    directory: str,
    step: int,
    *,
    generation: int = 1,
    shards: int = 2,
    job: str = "job",
    tensors: Tensors | None = None,
    disk: Files = REAL,
) -> str:
    """A complete checkpoint, in pieces of a page, by one thread."""
    tensors = state_at(step) if tensors is None else tensors
    with on(disk):
        for shard in range(shards):
            extra = {"step": step, "shard": shard}
            with filled(tensors, step, generation, shard, shards, extra) as arena:
                write_shard(arena, directory, job, threads=1, piece_nbytes=PIECE)
        return commit(directory, job, step=step, generation=generation, shards=shards, world_size=shards)


def blank() -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in state_at(0).items()}


def shard_paths(path: str) -> list[str]:
    return [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".safetensors")]


def flip(path: str, at: int) -> None:
    """Turn one bit of the byte at offset `at` (negative: from the end)."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def resume(directory: str, job: str, into: Into, *, threads: int = READ_THREADS) -> Found | None:
    """Load the newest checkpoint into existing tensors, whatever it holds."""
    return load_newest(directory, job, lambda _: into, threads=threads)
