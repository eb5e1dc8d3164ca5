"""The table of a state's tensors, common to snapshots, checkpoints and broadcasts."""

from __future__ import annotations

import msgspec


class TensorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of the state, by name, or one rank's box of it. Tied tensors appear once, under their first name."""

    name: str
    """'model.blocks.0.weight', 'optimizer.state.3.exp_avg', …"""
    dtype: str
    """safetensors' code: F32, BF16, I64, BOOL, …"""
    shape: tuple[int, ...]
    nbytes: int
    of: tuple[int, ...] = ()
    """Shape of the whole tensor, of which this is the box that begins at `at`; (): this is the whole tensor."""
    at: tuple[int, ...] = ()


Table = tuple[TensorInfo, ...]


class ReplicaTensors(msgspec.Struct, frozen=True):
    """Tensors of other nodes' shards that a rank keeps in memory beside its own, and never writes to disk."""

    table: Table = ()
    positions: tuple[int, ...] = ()
    """Index of each of them in the complete table of the state."""


NO_REPLICAS = ReplicaTensors()
