"""The job's process group while the script's `train` runs: it is elastic's to end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def kept_group() -> Iterator[None]:
    """Within, `dist.destroy_process_group()` leaves the job's group alone, and says so; groups of the script's own end.

    Scripts for torchrun, and Accelerate's `end_training`, call it last. But another rank may die until all are done,
    and would find no state. Raises RuntimeError at the end if the group was ended in another way, as by a name that was
    imported before.
    """
    if not dist.is_initialized():
        yield
        return
    real, first = dist.destroy_process_group, dist.get_rank() == 0

    def keep(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            real(group)
        elif first:
            said = "elastic: train() calls destroy_process_group(), which is left out: elastic.run ends the group"
            print(said, file=sys.stderr, flush=True)

    dist.destroy_process_group = keep
    try:
        yield
    finally:
        dist.destroy_process_group = real
    if not dist.is_initialized():
        raise RuntimeError(
            "train() has ended torch's default process group, which is the job's: leave out destroy_process_group(), "
            "elastic.run calls it when all ranks are done"
        )
