"""Both implementations of a process group, for tests of what holds for either.

@both
def test_something(forming: str) -> None:
    run_ranks(my_function, world_size=2, forming=forming)       # make(forming, rank, ...) in it
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.worker.comm.group import Group
from elastic.worker.comm.reconfigured import group_kind
from elastic.worker.torch_internals import torch_private

needs_reconfigure = pytest.mark.skipif(
    not torch_private.RECONFIGURABLE, reason=f"torch {torch.__version__} forms no group again in place: 2.14 does"
)
both = pytest.mark.parametrize("forming", ["new", pytest.param("reconfigure", marks=needs_reconfigure)])


def make(forming: Any, rank: int, world_size: int, port: int, generation: int, **options: Any) -> Group:
    return group_kind(forming, "gloo")(
        backend="gloo",
        rank=rank,
        world_size=world_size,
        store_host="127.0.0.1",
        store_port=port,
        generation=generation,
        **options,
    )


def formed(rank: int, world_size: int, port: int) -> Group:
    """A new group of generation 1."""
    group = make("new", rank, world_size, port, 1)
    group.form()
    return group
