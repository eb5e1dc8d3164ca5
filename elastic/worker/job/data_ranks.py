"""Which part of each global batch a rank takes, where ranks share the work on one part: those of one tensor-parallel
group must take the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError
from elastic.worker.state.parts.boxes import is_sharded

_TELL = (
    "tell job.batches which ranks take different samples: mesh=mesh['data'], the mesh (or the part of it) that the "
    "data is parallel over; the ranks along its other dimensions take the same"
)


def data_rank(
    modules: list[torch.nn.Module], mesh: Any, rank: int, world_size: int, *, alike: bool = False
) -> tuple[int, int]:
    """(number of this rank's part, number of parts). Raises MisuseTypeError if that cannot be known, MisuseValueError
    for a mesh that this rank is not in. `alike`: each rank has the whole state."""
    if mesh is None:
        if any(map(_shares_work, modules)) or not (alike or any(map(_by_fsdp, modules))):
            raise MisuseTypeError(f"state: the model is not sharded by fully_shard over one dimension alone: {_TELL}")
        return rank, world_size
    if not isinstance(mesh, DeviceMesh):
        raise MisuseTypeError(f"job.batches(mesh={type(mesh).__name__}): a DeviceMesh; {_TELL}")
    if (place := mesh.get_coordinate()) is None:
        raise MisuseValueError(f"job.batches(mesh={mesh}): rank {rank} is not in this mesh; {_TELL}")
    number, shape = 0, tuple(mesh.shape)
    for at, size in zip(place, shape, strict=True):
        number = number * size + at
    return number, math.prod(shape)


def _shares_work(module: torch.nn.Module) -> bool:
    """Whether ranks may work on the same samples: a parameter is sharded without FSDP, or by it and once more."""
    sharded: list[Any] = [param for param in module.parameters() if is_sharded(param)]
    cuts = [sum(not placement.is_replicate() for placement in param.placements) for param in sharded]
    return bool(sharded) and (not _by_fsdp(module) or max(cuts) > 1)


def _by_fsdp(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for inner in module.modules() for kind in type(inner).__mro__)


def refuse_sharded(state: Any, call: str, instead: str) -> None:
    """Raises MisuseTypeError for what shares data out to the ranks as if each had the whole model."""
    if state.is_sharded:
        raise MisuseTypeError(f"{call} with a sharded state: {instead}")


def refuse_weights(options: Mapping[str, Any]) -> None:
    """Raises MisuseValueError for options that need weights: sharding averages the means of all parts alike."""
    if options.get("micro_batch") is not None:
        raise MisuseValueError(
            "job.batches(micro_batch=…) with a sharded state: accumulate with set_requires_gradient_sync in the loop"
        )
