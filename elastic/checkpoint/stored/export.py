"""Export of a checkpoint: one `torch.save` file, or a `torch.distributed.checkpoint` directory.

The file has the form that plain torch loads: ``{"step": n, "model": state_dict, "optimizer": state_dict, …}`` (see
`plain`). The directory is flat: ``{"state": {name: tensor}, "extra": {…}, "step": n}``, and so is the file of a
checkpoint that is not a `State`'s. Every byte is verified. elastic never reads the result back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any

import torch

from elastic.checkpoint.format import files
from elastic.checkpoint.format.dtypes import dtype_of
from elastic.checkpoint.format.errors import SaveFailed
from elastic.checkpoint.format.plain import plain
from elastic.contract.worker.tensor_table import TensorInfo

from .find import Found, verify
from .read import load


def read_all(path: str) -> dict[str, Any]:
    """The whole checkpoint in memory. Raises Damaged, SaveFailed for stages of a pipeline."""
    manifest = verify(path, None, hashes=False)
    if manifest.extra.get("staged"):
        raise SaveFailed(f"{path} has parts whose names differ by rank (stages of a pipeline): no whole state_dict")
    state: dict[str, torch.Tensor] = {}
    # Of what is not sharded each rank has saved what it may have of its own, under one name.
    others = {
        id(info) for shard in manifest.shards[1:] if shard.extra.get("key") for info in shard.tensors if not info.of
    }

    def into(info: TensorInfo) -> torch.Tensor | None:
        if id(info) in others:
            return None
        if info.name not in state:
            state[info.name] = torch.empty(info.of or info.shape, dtype=dtype_of(info.dtype))
        whole = state[info.name]
        return whole[tuple(slice(at, at + n) for at, n in zip(info.at, info.shape, strict=True))] if info.of else whole

    load(Found(path, manifest), into)
    return {"state": state, "extra": manifest.extra, "step": manifest.step}


def to_torch_save(path: str, target: str) -> None:
    """One file that `torch.load(target, weights_only=True)` reads. Raises Damaged, OSError, SaveFailed."""
    content = read_all(path)
    if "parts" in (extra := content["extra"].get("state") or {}):
        content = plain(content["state"], extra)
    aside = f"{target}.{os.getpid()}.part"
    try:
        try:
            with open(files.REAL.create(aside), "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:  # raised by torch's zip writer on a full disk
            raise SaveFailed(f"{target}: {error}") from error
        files.REAL.rename(aside, target)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(aside)


def to_dcp(path: str, target: str) -> None:
    """A directory that `torch.distributed.checkpoint.load` reads; must not exist. Raises Damaged, SaveFailed."""
    import torch.distributed.checkpoint as dcp

    if os.path.exists(target):
        raise SaveFailed(f"{target} exists")
    content = read_all(path)
    aside = f"{os.path.normpath(target)}.{os.getpid()}.part"
    try:
        dcp.save(content, storage_writer=dcp.FileSystemWriter(aside), no_dist=True)  # type: ignore[attr-defined]
        os.rename(aside, target)
    except dcp.CheckpointException as error:  # type: ignore[attr-defined]
        raise SaveFailed(f"{target}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # a partial one would look complete, and block the next export
