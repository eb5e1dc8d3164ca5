"""The step is the position in the data: which samples a step takes, and which of them a rank takes.

All of it is a pure function of (seed, dataset size, global batch, step, rank, world size). So nothing about the data
has to be saved or sent, and every sample of an epoch is taken exactly once, however the world size changes meanwhile.

The order of an epoch is a keyed permutation that is computed index by index (a Feistel network over the next power
of two, iterated until the result is in range), not a shuffled list: it takes no memory and no start-up time,
whether for 10 samples or for 10^8.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from elastic.worker.link.misuse import MisuseValueError

Ints = TypeVar("Ints", bound=Any)
"""int, or a numpy array of uint64 (this module does not import numpy)."""

_ROUNDS = 8
_WORD = 0xFFFFFFFF


class GlobalBatch(msgspec.Struct, frozen=True):
    """The samples of one step, as positions within the epoch's order."""

    step: int
    epoch: int
    start: int
    stop: int
    last: bool
    """Of its epoch."""

    @property
    def size(self) -> int:
        return self.stop - self.start


def no_full_batch(samples: int, batch_size: int) -> MisuseValueError:
    return MisuseValueError(
        f"drop_last=True with {samples} samples and batch_size = {batch_size}: no batch is full; lower batch_size, or "
        "leave drop_last out"
    )


class BatchPlan(msgspec.Struct, frozen=True):
    """How a dataset is cut into steps. Raises ValueError for an empty dataset or batch."""

    samples: int
    batch_size: int
    """Samples per step over all ranks. The last step of an epoch takes the remaining ones; nothing is padded."""
    drop_last: bool = False
    """They are left out instead."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise MisuseValueError(f"samples = {self.samples}: a dataset needs at least one sample")
        if self.batch_size < 1:
            raise MisuseValueError(f"batch_size = {self.batch_size}: the global batch needs at least one sample")

        if self.drop_last and self.samples < self.batch_size:
            raise no_full_batch(self.samples, self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def at(self, step: int) -> GlobalBatch:
        """The global batch of `step`, counted from 0 at the start of training."""
        if step < 0:
            raise ValueError(f"step = {step}: steps count from 0")
        size, samples = self.batch_size, self.samples
        each = samples // size if self.drop_last else -(-samples // size)  # as `steps_per_epoch`, quicker
        epoch, turn = divmod(step, each)
        start = turn * size
        stop = start + size
        return GlobalBatch(step, epoch, start, stop if stop < samples else samples, turn == each - 1)


def rank_range(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """`rank`'s contiguous part of [start, stop). Sizes differ by at most one sample; the low ranks have the larger."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}: not in a world of {world_size}")
    each, over = divmod(stop - start, world_size)
    first = start + rank * each + min(rank, over)
    return first, first + each + (rank < over)


def most_of(count: int, world_size: int) -> int:
    """How many of `count` the rank with the most has, by `rank_range`."""
    return -(-count // world_size)


def micro_sizes(size: int, most: int | None) -> tuple[int, ...]:
    """Split `size` samples into the fewest micro-batches of at most `most`; their sizes differ by at most one.

    The larger ones come first. No samples give one micro-batch of 0: the rank still takes part in the exchange.
    """
    if most is not None and most < 1:
        raise MisuseValueError(f"micro_batch = {most}: a micro-batch needs at least one sample")
    parts = 1 if most is None or size <= most else -(-size // most)
    each, over = divmod(size, parts)
    return tuple(each + (i < over) for i in range(parts))


class SampleOrder:
    """A permutation of range(samples), by key (seed, epoch)."""

    def __init__(self, samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self.samples = samples
        self._shuffle = shuffle and samples > 1
        bits = max(2, (samples - 1).bit_length())
        if bits > 62:
            raise MisuseValueError(f"samples = {samples}: more than 2**62")
        self.domain = 1 << bits
        """`permute` is one of range(domain), the next power of two."""
        self._low_bits = bits // 2
        self._low = (1 << self._low_bits) - 1
        self._high = (1 << (bits - self._low_bits)) - 1
        self._keys = derive(seed, epoch)

    def __getitem__(self, position: int) -> int:
        """The sample at `position` of this epoch."""
        if not 0 <= position < self.samples:
            raise IndexError(position)
        if not self._shuffle:
            return position
        sample = self.permute(position)
        while sample >= self.samples:  # at most half of the domain is out of range: two passes on average at most
            sample = self.permute(sample)
        return sample

    def take(self, start: int, stop: int) -> Sequence[int]:
        return tuple(self[position] for position in range(start, stop))

    def permute(self, x: Ints) -> Ints:
        """One pass over the whole power of two: an alternating unbalanced Feistel network.

        Takes an int, or an array of unsigned 64-bit integers, whose halves are 32-bit ones, several times as fast.
        """
        high, low, mix = x >> self._low_bits, x & self._low, _mix
        if array := hasattr(x, "astype"):
            high, low, mix = high.astype("uint32"), low.astype("uint32"), _mix_all
        keys = iter(self._keys)
        for key in keys:
            high ^= mix(low, key) & self._high
            low ^= mix(high, next(keys)) & self._low
        if array:
            high = high.astype("uint64")
        return cast("Ints", high << self._low_bits | low)


def _mix(x: int, key: int) -> int:
    """32 bits in, 32 bits out: the finalizer of MurmurHash3 with a key."""
    x = (x ^ key) * 0x9E3779B1 & _WORD
    x = (x ^ x >> 16) * 0x85EBCA6B & _WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & _WORD
    return x ^ x >> 16


def _mix_all(x: Any, key: int) -> Any:
    """`_mix` of an array of unsigned 32-bit integers, which wraps by itself."""
    x = x ^ key
    for factor, bits in ((0x9E3779B1, 16), (0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        x *= factor
        x ^= x >> bits
    return x


def derive(seed: int, *path: int) -> tuple[int, ...]:
    """Eight 32-bit words that depend on every argument: keys of the order, and seeds of random generators."""
    text = ":".join(map(str, (seed, *path))).encode()
    return struct.unpack("<8I", hashlib.blake2b(text, digest_size=4 * _ROUNDS).digest())
