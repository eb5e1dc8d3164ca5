"""The broadcast of a model's buffers in a gloo group, which an abort can end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic.worker.torch_internals import torch_private

from .in_flight import IN_FLIGHT

Future = torch.futures.Future[Any]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int, bucket_bytes: int
) -> None:
    """Copy rank `source`'s tensors, on the CPU, into those of all ranks, in messages of about `bucket_bytes`.

    Raises GroupAborted if the group is aborted meanwhile, and gloo's RuntimeError if a message fails; these tensors are
    then unchanged, but for those of messages that are complete.
    """
    started = []
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        # As bytes: gloo takes no int16, no float8.
        work = dist.broadcast(flat.view(torch.uint8), group=group, group_src=source, async_op=True)
        assert work is not None  # only for ranks outside the group
        started.append((bucket, flat, IN_FLIGHT.follow(work.get_future(), _done, lambda: None)))
    for bucket, flat, future in started:
        future.wait()
        if group.rank() != source:
            parts = flat.split_with_sizes([tensor.numel() for tensor in bucket])
            shaped = [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]
            torch_private.foreach_copy(bucket, shaped)


def _buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Of one dtype each, and the same on all ranks."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, size = list[torch.Tensor](), 0
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _done(future: Future) -> torch.Tensor:
    future.value()  # raises what gloo has raised
    return torch.empty(0)
