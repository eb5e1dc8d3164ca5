"""Sharded tensors as this rank has them: the local tensor, and the box of the whole one that it is."""

from __future__ import annotations

from typing import Any

import torch

from elastic.worker.torch_internals import torch_private

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(shape of the whole tensor, offset of the box in it)."""

WHOLE: Box = (), ()
"""Of a tensor that is whole on this rank."""


class Accepted:
    """Whether `setup` runs in the formed group, and each rank restores its own part: sharded tensors are then part of
    a state. Of the process: the script makes its `State` without being asked for the job."""

    sharded = False


def is_sharded(tensor: object) -> bool:
    return type(tensor).__name__ == "DTensor"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in this rank's memory, which shares its storage; `tensor` itself if it is no DTensor."""
    return torch_private.local_tensor(tensor) if is_sharded(tensor) else tensor


def mesh_size(tensor: Any) -> int:
    """How many ranks share a DTensor."""
    return int(tensor.device_mesh.size())


def box_of(tensor: torch.Tensor) -> Box:
    """Raises MisuseTypeError for a partial sum."""
    return torch_private.box(tensor) if is_sharded(tensor) else WHOLE
