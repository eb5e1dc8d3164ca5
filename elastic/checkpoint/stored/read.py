"""Loading from disk into the caller's own tensors, verified while reading. Nothing is unpickled.

Tensors are matched by name, so a checkpoint of any world size loads into any other.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from elastic.checkpoint.format import files
from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.dtypes import dtype_of
from elastic.checkpoint.format.errors import CheckpointError, Damaged, NoGoodCheckpoint
from elastic.checkpoint.memory.memcpy import movable
from elastic.checkpoint.memory.progress import Progress, unreported
from elastic.contract.worker.tensor_table import TensorInfo

from .find import READ_THREADS, Aside, Found, Spare, newest_good, read_piece, set_aside

Into = Callable[[TensorInfo], torch.Tensor | None]
"""Destination of a tensor of the checkpoint; None: it is not wanted."""


class Mismatch(CheckpointError):
    """The checkpoint is good, but one of its tensors has another dtype or shape than the caller's."""


def load_newest(
    directory: str,
    job: str,
    prepare: Callable[[Found], Into],
    *,
    remote: str = "",
    threads: int = READ_THREADS,
    progress: Progress = unreported,
) -> Found | None:
    """Load the newest good checkpoint; each byte is read once, and verified.

    If `directory` has no good one, the newest good one at the URL `remote`, if given, is fetched first.

    `prepare` is called with each candidate before it is loaded, to allocate its tensors. Returns None if there has
    never been a checkpoint. A damaged one is quarantined, an unreadable one is passed over, and the one before is
    loaded over the parts read so far. Raises NoGoodCheckpoint, Mismatch; with `remote` RemoteError.
    """
    try:
        if (found := _load_local(directory, job, prepare, threads, progress)) or not remote:
            return found
    except NoGoodCheckpoint:
        if not remote:
            raise
    from .remote import fetch_newest

    fetch_newest(remote, job, directory)
    # Also if there was nothing to fetch: this raises the error of `directory` again, or reads what can be read now.
    return _load_local(directory, job, prepare, threads, progress)


def _load_local(
    directory: str, job: str, prepare: Callable[[Found], Into], threads: int, progress: Progress
) -> Found | None:
    aside: tuple[Aside, ...] = ()
    while checkpoint := newest_good(directory, job, hashes=False, skip=aside):
        before = files.REAL.identity(checkpoint.path)
        try:
            load(checkpoint, prepare(checkpoint), threads=threads, progress=progress)
            return checkpoint
        except Damaged as damage:
            aside = (*checkpoint.aside, set_aside(checkpoint.path, damage, before=before))
    return None


def load(found: Found, into: Into, *, threads: int = READ_THREADS, progress: Progress = unreported) -> None:
    """Read every shard and verify each piece; `progress` is called after each.

    Raises Mismatch, and Damaged: part of `into` is then overwritten.
    """
    targets = [
        _Target(shard, [_place(tensor, into(tensor)) for tensor in shard.tensors]) for shard in found.manifest.shards
    ]
    pieces = [(target, index) for target in targets for index in range(len(target.shard.xxh3))]
    spare = Spare()

    def piece(job: tuple[_Target, int]) -> None:
        target, index = job
        read_piece(found.path, target.shard, index, target.views(index, spare))
        target.done(index)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        running = [pool.submit(piece, job) for job in pieces]
        try:
            for future, (target, _) in zip(running, pieces, strict=True):
                future.result()
                progress(target.shard.piece_nbytes)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure, the other pieces need not be read


@dataclass(slots=True)
class _Place:
    """Destination of one tensor: its own memory, a buffer (another device, strides), or none."""

    nbytes: int
    target: torch.Tensor | None
    straight: bool
    left: int
    """Bytes still to be read; counted for tensors that go through a buffer."""
    buffer: torch.Tensor | None = None


def _place(info: TensorInfo, target: torch.Tensor | None) -> _Place:
    if target is None:
        return _Place(info.nbytes, None, False, info.nbytes)
    target = target.detach()
    if target.dtype != dtype_of(info.dtype) or tuple(target.shape) != info.shape:
        raise Mismatch(
            f"{info.name} is {info.dtype} {list(info.shape)} in the checkpoint, "
            f"{target.dtype} {list(target.shape)} in this program"
        )
    return _Place(info.nbytes, target, movable(target), info.nbytes)


class _Target:
    """The destinations of one shard, by their offsets in its file."""

    def __init__(self, shard: m.Shard, places: list[_Place]) -> None:
        self.shard = shard
        self._places = places
        self._starts: list[int] = []
        at = shard.data_at
        for place in places:
            self._starts.append(at)
            at += place.nbytes
        self._lock = threading.Lock()

    def views(self, index: int, spare: Spare) -> list[memoryview]:
        """The buffers into which piece `index` is read, in order."""
        at = index * self.shard.piece_nbytes
        end = min(at + self.shard.piece_nbytes, self.shard.nbytes)
        rest = spare.take(end - at)
        views = []
        if at < self.shard.data_at:
            head = min(end, self.shard.data_at) - at
            views.append(rest[:head])
            rest = rest[head:]
        for place, begin, to in self._overlaps(at, end):
            if place.target is None:
                views.append(rest[: to - begin])
                rest = rest[to - begin :]
            else:
                views.append(_bytes_of(self._memory(place))[begin:to])
        return views

    def done(self, index: int) -> None:
        """Piece `index` is read and verified: copy the buffers that are complete."""
        at = index * self.shard.piece_nbytes
        for place, begin, to in self._overlaps(at, min(at + self.shard.piece_nbytes, self.shard.nbytes)):
            if place.straight or place.target is None:
                continue
            with self._lock:
                place.left -= to - begin
                complete = place.left == 0
            if complete and place.buffer is not None:
                place.target.copy_(place.buffer)
                place.buffer = None

    def _overlaps(self, at: int, end: int) -> list[tuple[_Place, int, int]]:
        """Destinations that overlap with [at, end) of the file, with the range in each."""
        overlaps = []
        for i in range(max(0, bisect.bisect_right(self._starts, at) - 1), len(self._starts)):
            start, place = self._starts[i], self._places[i]
            if start >= end:
                break
            begin, to = max(at, start) - start, min(end, start + place.nbytes) - start
            if begin < to:
                overlaps.append((place, begin, to))
        return overlaps

    def _memory(self, place: _Place) -> torch.Tensor:
        assert place.target is not None
        if place.straight:
            return place.target
        with self._lock:
            if place.buffer is None:
                place.buffer = torch.empty(place.target.shape, dtype=place.target.dtype)
            return place.buffer


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Memory of a dense CPU tensor, whatever its dtype. The caller keeps the tensor alive."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
