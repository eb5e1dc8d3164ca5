"""Modules that a state cannot keep, refused by name and with the way out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elastic.worker.misuse import MisuseTypeError

from .optimizers import sharded_module


def refuse_sharded(name: str, module: torch.nn.Module) -> None:
    """Raises TypeError if each rank has a part of the parameters only."""
    kinds = {kind.__name__ for inner in module.modules() for kind in type(inner).__mro__}
    found = next((kind for kind in ("FSDPModule", "FullyShardedDataParallel") if kind in kinds), "")
    if not found:
        found = "DTensor" if any(type(p).__name__ == "DTensor" for p in module.parameters()) else ""
    if found:
        raise MisuseTypeError(sharded_module(name, found))


def refuse_lazy(name: str, module: torch.nn.Module) -> None:
    """Raises TypeError if a tensor has no shape yet."""
    held = [*module.named_parameters(), *module.named_buffers()]
    if found := next((key for key, tensor in held if torch.nn.parameter.is_lazy(tensor)), ""):
        raise MisuseTypeError(f"state.{name}.{found} has no shape yet: run one forward of the lazy module in setup()")


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
