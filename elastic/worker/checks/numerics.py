"""A cheap check of numerics: replicas that have diverged."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from elastic.worker.comm.in_flight import complete
from elastic.worker.comm.p2p import control_device
from elastic.worker.link.misuse import MisuseRuntimeError

WINDOW_BYTES = 4 * 1024 * 1024


class Fingerprint:
    """A hash of a window of the state; the window moves on from check to check until it has covered all bytes.

    One flipped bit inside the window changes the hash. `tensors` must be in the same order on every rank; the window's
    position depends only on the number of the check, so ranks agree on it without communication. Cost per check:
    `window_bytes` copied to the host and hashed (about 1 ms for 4 MiB).
    """

    def __init__(self, tensors: Sequence[torch.Tensor], window_bytes: int = WINDOW_BYTES) -> None:
        self._tensors = [t for t in tensors if t.numel() > 0]
        self._window_bytes = window_bytes
        self.total_bytes = sum(t.numel() * t.element_size() for t in self._tensors)

    @property
    def checks_per_round(self) -> int:
        """Number of consecutive checks that cover every byte."""
        return max(1, -(-self.total_bytes // self._window_bytes))

    def of(self, check: int) -> int:
        """Hash of window number `check` (modulo `checks_per_round`): 63 bits, so that it fits an int64."""
        start = check % self.checks_per_round * self._window_bytes
        stop = start + self._window_bytes
        digest = xxhash.xxh3_64(seed=start)
        offset = 0
        for tensor in self._tensors:
            size = tensor.numel() * tensor.element_size()
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last:
                digest.update(_bytes_of(tensor, first, last))
            offset += size
            if offset >= stop:
                break
        return digest.intdigest() >> 1


def _bytes_of(tensor: torch.Tensor, first: int, last: int) -> memoryview:
    """Bytes [first, last) of the tensor's elements in order, rounded out to whole elements."""
    each = tensor.element_size()
    flat = tensor.detach().reshape(-1)[first // each : -(-last // each)]
    return flat.contiguous().cpu().view(torch.uint8).numpy().data


def outliers(digests: Sequence[int]) -> tuple[int, ...]:
    """The ranks that differ from the majority; all ranks if there is no majority; none if all agree."""
    counts = Counter(digests).most_common()
    if len(counts) == 1:
        return ()
    value, most = counts[0]
    if 2 * most <= len(digests):
        return tuple(range(len(digests)))
    return tuple(rank for rank, digest in enumerate(digests) if digest != value)


def disagreeing(digest: int, *, world_size: int) -> tuple[int, ...]:
    """Exchange `digest` (8 bytes per rank; all ranks must call) and return `outliers`, the same on every rank."""
    mine = torch.tensor([digest], dtype=torch.int64, device=control_device())
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    complete(dist.all_gather(everyone, mine, async_op=True), mine.device)
    return outliers([int(d) for d in torch.cat(everyone).tolist()])


def refuse_different(model: nn.Module, *, world_size: int) -> None:
    """All ranks must call. Raises RuntimeError if the parameters of `model` are not the same on all of them.

    All have those of one rank's `setup`. If a rank then changes its own, stock DDP sends rank 0's to all; here, where
    none are sent, the replicas would differ for good.
    """
    digest = Fingerprint([param.detach() for param in model.parameters()], sys.maxsize).of(0)
    if ranks := disagreeing(digest, world_size=world_size):
        which = f"{', '.join(map(str, ranks))} from the majority" if len(ranks) < world_size else "no majority agrees"
        raise MisuseRuntimeError(
            f"job.ddp: the parameters differ between the ranks ({which}): they were changed in train() on some ranks "
            "only, as in `if job.rank == 0: model.load_state_dict(…)`. Load weights in setup(): its state goes to all "
            "ranks"
        )
