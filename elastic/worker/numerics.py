"""Cheap checks of the numbers: a loss that is none, and replicas that drifted apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
import xxhash

WINDOW_BYTES = 4 * 1024 * 1024


def is_bad(loss: float | torch.Tensor) -> bool:
    """Whether `loss` is NaN or infinite. A tensor on a GPU is waited for."""
    return not math.isfinite(float(loss.detach()) if isinstance(loss, torch.Tensor) else loss)


class Fingerprint:
    """A hash of a window of the state that moves on from check to check until it has been everywhere.

    One flipped bit inside the window changes it. `tensors` in the same order on every rank; the window's place is a
    function of the number of the check alone, so that ranks agree on it without a word. Cost: `window_bytes` copied to
    the host and hashed (about 1 ms for 4 MiB), once per check.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], window_bytes: int = WINDOW_BYTES) -> None:
        self._tensors = [t for t in tensors if t.numel() > 0]
        self._window_bytes = window_bytes
        self.total_bytes = sum(t.numel() * t.element_size() for t in self._tensors)

    @property
    def checks_per_round(self) -> int:
        """After so many checks in a row every byte has been looked at."""
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
    flat = tensor.detach()
    flat = flat.reshape(-1)[first // each : -(-last // each)]
    return flat.contiguous().cpu().view(torch.uint8).numpy().data


def outliers(digests: Sequence[int]) -> tuple[int, ...]:
    """The ranks that differ from the majority; all of them when there is none; none when all agree."""
    counts = Counter(digests).most_common()
    if len(counts) == 1:
        return ()
    value, most = counts[0]
    if 2 * most <= len(digests):
        return tuple(range(len(digests)))
    return tuple(rank for rank, digest in enumerate(digests) if digest != value)


def disagreeing(
    digest: int, *, world_size: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> tuple[int, ...]:
    """Exchange `digest` (8 bytes a rank; every rank must call) and return `outliers`, the same on every rank."""
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine, group=group)
    return outliers([int(d) for d in torch.cat(everyone).tolist()])
