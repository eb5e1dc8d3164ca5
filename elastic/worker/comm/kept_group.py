"""The job's process group while the script's `train` runs, and after it: it is elastic's to form and to end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from elastic.worker.link.misuse import MisuseRuntimeError

_TWICE = "default process group twice"
"""Of torch's message for an `init_process_group` beside the job's group."""


@contextlib.contextmanager
def kept_group() -> Iterator[None]:
    """Within, `dist.destroy_process_group()` leaves the job's group alone, and says so; groups of the script's own end.

    Scripts for torchrun, and Accelerate's `end_training`, call it last. But another rank may die until all are done,
    and would find no state. Raises RuntimeError at the end if the group was ended in another way, as by a name that was
    imported before, and in place of torch's error for an `init_process_group` of the script's.
    """
    if not dist.is_initialized():
        yield
        return
    real = dist.destroy_process_group

    def keep(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            real(group)
        elif dist.get_rank() == 0:
            _left_out("train()")

    dist.destroy_process_group = keep
    try:
        yield
    except ValueError as error:
        if _TWICE in str(error) and dist.is_initialized():
            raise MisuseRuntimeError(
                "train() calls init_process_group(), and the job's group is formed already: leave it out. "
                "dist.get_rank() and all collectives work in train(); for a group of some ranks use job.new_group(…)"
            ) from error
        raise
    finally:
        dist.destroy_process_group = real
    if not dist.is_initialized():
        raise MisuseRuntimeError(
            "train() has ended torch's default process group, which is the job's: leave out destroy_process_group(), "
            "elastic.run calls it when all ranks are done"
        )


def group_is_over(*, first: bool) -> None:
    """`elastic.run` has ended the job's group and is about to return. Scripts for torchrun end the group after that:
    torch's own function would raise AssertionError, and end a script that has trained to completion with exit code 1.
    `first`: this is rank 0, which says so."""
    real = dist.destroy_process_group

    def over(group: Any = None) -> None:
        if group is not None or dist.is_initialized():
            real(group)
        elif first:
            _left_out("the script")

    dist.destroy_process_group = over


def _left_out(caller: str) -> None:
    said = f"elastic: {caller} calls destroy_process_group(), which is left out: elastic.run ends the group"
    print(said, file=sys.stderr, flush=True)
