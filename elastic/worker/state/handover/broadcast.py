"""The state on its way to the ranks that lack it, along a chain: in slices, from storage to storage, with checksums.

A chain moves every byte once over every link, and ranks are numbered node by node, so each network link carries the
state once. Ranks outside the chain take no part. Large tensors are sent in slices of their own memory; small and
non-contiguous ones go through reused staging buffers. Much data between CPUs goes over sockets of its own
(`comm/direct.py`), all else over the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import xxhash

from elastic.checkpoint.memory.memcpy import device_type, movable
from elastic.worker.comm import direct
from elastic.worker.comm.p2p import exchange, memory_of
from elastic.worker.torch_internals import torch_private

SLICE_BYTES = 4 << 20
"""Maximum size of a slice. Those that are in flight shall fit into a CPU's cache, where hashing takes a third of the
time; smaller ones cost more calls and wake-ups than the cache saves."""

SMALL_BYTES = 1 << 20
"""Tensors below this size are packed together."""

ALIGN = 16
"""Tensors start at multiples of this many bytes in a packed slice, so that any dtype can be viewed there."""

IN_FLIGHT = 4
"""Slices on their way from the previous rank, and to the following one; so many staging buffers exist of each."""


DIRECT_BYTES = 16 << 20
"""From this size on, data on the CPU goes over sockets of its own; for less, making the connection is not worth it."""


class CorruptError(RuntimeError):
    """The received bytes differ from those that were sent."""


class Segment(NamedTuple):
    tensor: int
    """Index into the list of tensors."""
    start: int
    """First element, in row-major order."""
    elements: int
    offset: int
    """Byte offset in the slice."""


class Slice(NamedTuple):
    segments: tuple[Segment, ...]
    nbytes: int


def plan(tensors: Sequence[torch.Tensor]) -> list[Slice]:
    """How to slice the tensors; the same on both sides, as it depends only on sizes and device types."""
    slices: list[Slice] = []
    for kind in sorted(set(kinds := [device_type(tensor) for tensor in tensors])):
        small: list[int] = []
        for index, tensor in enumerate(tensors):
            size = tensor.element_size()
            if kinds[index] != kind or tensor.numel() == 0:
                continue
            if tensor.numel() * size < SMALL_BYTES:
                small.append(index)
                continue
            step = SLICE_BYTES // size
            for start in range(0, tensor.numel(), step):
                count = min(step, tensor.numel() - start)
                slices.append(Slice((Segment(index, start, count, 0),), count * size))
        slices += _packed(small, tensors)
    return slices


def _packed(indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> Iterator[Slice]:
    segments: list[Segment] = []
    end = 0
    for index in indices:
        tensor = tensors[index]
        nbytes = tensor.numel() * tensor.element_size()
        start = -(-end // ALIGN) * ALIGN
        if start + nbytes > SLICE_BYTES:
            yield Slice(tuple(segments), end)
            segments, start = [], 0
        segments.append(Segment(index, 0, tensor.numel(), start))
        end = start + nbytes
    if segments:
        yield Slice(tuple(segments), end)


def relay(
    tensors: Sequence[torch.Tensor],
    *,
    previous: int | None,
    following: int | None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Fill `tensors` from rank `previous` (None: this rank is the source), and forward them to rank `following`.

    Returns the number of bytes moved here. `check` is called after each slice and raises to stop. Raises CorruptError,
    or what torch raises when the group is aborted.
    """

    def moved(some: Sequence[Slice], transport: direct.Transport) -> list[int]:
        if previous is not None:
            return _receive(some, tensors, transport, following is not None, check)
        return _send(some, tensors, transport, check) if following is not None else []

    slices = plan(tensors)
    near = [part for part in slices if device_type(tensors[part.segments[0].tensor]) == "cpu"]
    digests: list[int] = []
    with contextlib.ExitStack() as stack:
        if sum(part.nbytes for part in near) >= DIRECT_BYTES:
            sockets = stack.enter_context(direct.connected(previous, following))
            digests += moved(near, sockets)
            near_here = set(map(id, near))
            slices = [part for part in slices if id(part) not in near_here]
        digests += moved(slices, direct.Transport(previous, following))
        mine = torch.tensor(digests, dtype=torch.int64)
        theirs = mine.clone()
        if previous is not None:
            exchange(theirs, source=previous)
        if following is not None:
            exchange(theirs, target=following)  # waits until that rank has everything
    check()
    compare(mine, theirs)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def compare(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raises CorruptError if digests differ."""
    if wrong := (mine != theirs).nonzero().flatten().tolist():
        raise CorruptError(f"{len(wrong)} of {len(mine)} slices of the state arrived damaged, the first is {wrong[0]}")


def _send(
    slices: Sequence[Slice], tensors: Sequence[torch.Tensor], transport: direct.Transport, check: Callable[[], None]
) -> list[int]:
    staging = _Staging()
    flying: list[tuple[direct.Work, torch.Tensor]] = []
    digests = []
    for part, own in zip(slices, _own_memory(slices, tensors), strict=True):
        data = own
        if data is None:
            data = staging.take(part, tensors)
            _copy(part, tensors, data, pack=True)
        flying.append((transport.isend(data), data))
        digests.append(digest(data))
        if len(flying) == IN_FLIGHT:
            _land(flying, staging, check)
    while flying:
        _land(flying, staging, check)
    return digests


def _land(flying: list[tuple[direct.Work, torch.Tensor]], staging: _Staging, check: Callable[[], None]) -> None:
    work, data = flying.pop(0)
    work.wait()
    check()
    staging.give(data)


def _receive(
    slices: Sequence[Slice],
    tensors: Sequence[torch.Tensor],
    transport: direct.Transport,
    forwards: bool,
    check: Callable[[], None],
) -> list[int]:
    staging = _Staging()
    coming: list[tuple[Slice | None, direct.Work, torch.Tensor]] = []
    going: list[tuple[direct.Work, torch.Tensor]] = []
    digests = []
    ahead = zip(slices, _own_memory(slices, tensors), strict=True)

    def ask() -> None:
        for part, own in itertools.islice(ahead, 1):
            data = staging.take(part, tensors) if own is None else own
            coming.append((part if own is None else None, transport.irecv(data), data))

    for _ in range(IN_FLIGHT):
        ask()
    while coming:
        staged, work, data = coming.pop(0)
        work.wait()
        check()
        ask()
        if forwards:
            going.append((transport.isend(data), data))
        digests.append(digest(data))
        if staged is not None:
            _copy(staged, tensors, data, pack=False)
        if not forwards:
            staging.give(data)
        elif len(going) == IN_FLIGHT:
            _land(going, staging, check)
    while going:
        _land(going, staging, check)
    return digests


def digest(data: torch.Tensor) -> int:
    """A 64-bit digest of the bytes: xxh3 on the CPU, a sum of words on a device (without a copy to the host)."""
    if data.device.type == "cpu":
        return signed(xxhash.xxh3_64_intdigest(memory_of(data)))
    return word_sum(data)


def signed(digest: int) -> int:
    """A digest of 64 bits, as it is sent."""
    return digest - (1 << 64) if digest >> 63 else digest


def word_sum(data: torch.Tensor) -> int:
    """Sum of the bytes as 64-bit words, plus the remaining bytes; wraps around."""
    words = data.numel() // 8 * 8 if data.storage_offset() % 8 == 0 else 0
    total = data[words:].sum(dtype=torch.int64)
    if words:
        total = total + data[:words].view(torch.int64).sum()
    return int(total)


class _Staging:
    """Buffers for data that cannot be sent or received in place."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def take(self, part: Slice, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        device = tensors[part.segments[0].tensor].device
        for number, buffer in enumerate(self._free):
            if buffer.device == device and buffer.numel() >= part.nbytes:
                del self._free[number]
                break
        else:
            buffer = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
        data = buffer[: part.nbytes]
        self._lent[id(data)] = buffer
        return data

    def give(self, data: torch.Tensor) -> None:
        if (buffer := self._lent.pop(id(data), None)) is not None:
            self._free.append(buffer)


def _own_memory(slices: Sequence[Slice], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """For each slice its own memory as bytes, if it is a single contiguous piece, else None.

    All at once: a view made in the loop, between two transfers, costs ten times as much.
    """
    own: list[torch.Tensor | None] = []
    pieces: Iterator[torch.Tensor] = iter(())
    for part in slices:
        segment = part.segments[0]
        tensor = tensors[segment.tensor]
        if len(part.segments) > 1 or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            own.append(None)
            continue
        if segment.start == 0:
            pieces = iter(byte_view(tensor).split(part.nbytes))  # type: ignore[no-untyped-call]
        own.append(next(pieces))
    return own


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor as a flat uint8 tensor that shares its memory."""
    flat = tensor.view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def _copy(part: Slice, tensors: Sequence[torch.Tensor], data: torch.Tensor, *, pack: bool) -> None:
    """From the tensors into `data` (`pack`), or from there into them. Of complete dense tensors in CPU memory a memmove
    each costs a tenth of torch's copy, which matters with thousands of them."""
    start, pairs = data.data_ptr(), list[tuple[torch.Tensor, torch.Tensor]]()
    for segment in part.segments:
        tensor = tensors[segment.tensor]
        if segment.elements == tensor.numel() and movable(tensor):
            ends = start + segment.offset, tensor.data_ptr()
            ctypes.memmove(*(ends if pack else ends[::-1]), tensor.numel() * tensor.element_size())
        else:
            pairs += pieces(tensor, segment.start, segment.elements, data[segment.offset :])
    if pairs:
        views, staged = [view for view, _ in pairs], [piece for _, piece in pairs]
        with torch.no_grad():
            torch_private.foreach_copy(*((staged, views) if pack else (views, staged)))


def pieces(
    tensor: torch.Tensor, start: int, count: int, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of these elements, each with the view of its place in `data`: same shape, same dtype."""
    offset = 0
    for piece in row_major(tensor, start, count):
        nbytes = piece.numel() * piece.element_size()
        yield piece, data[offset : offset + nbytes].view(tensor.dtype).view(piece.shape)
        offset += nbytes


def row_major(tensor: torch.Tensor, start: int, count: int) -> Iterator[torch.Tensor]:
    """Views that together cover the elements [start, start + count) in row-major order, for any strides."""
    if count == 0:
        return
    if start == 0 and count == tensor.numel():
        yield tensor
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start : start + count]
        return
    row = tensor[0].numel()
    first, skip = divmod(start, row)
    if skip:
        head = min(row - skip, count)
        yield from row_major(tensor[first], skip, head)
        first, count = first + 1, count - head
    rows, rest = divmod(count, row)
    if rows:
        yield tensor[first : first + rows]
    if rest:
        yield from row_major(tensor[first + rows], 0, rest)
