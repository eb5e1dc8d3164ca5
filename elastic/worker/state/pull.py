"""Ranks on the source's host read the state directly from its memory: one copy, and no socket.

`process_vm_readv` requires what ptrace requires: the same user, and a security module that allows it. Whether it works
is not guessed but tried: the source publishes a random number and its address, and a rank that can read it there is on
the same host, in the same PID namespace, and reads from the very process that made the offer. All others use sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ...checkpoint.memcpy import movable
from .broadcast import byte_view, row_major

PIECE_BYTES = 4 << 20
"""Bytes read at a time, then hashed: small enough to still be in the cache."""

MOST_VECTORS = 512
"""Maximum number of tensors read by one call; the kernel's limit is 1024."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Window(msgspec.Struct, frozen=True):
    """The source's description of its memory."""

    pid: int
    secret: str
    secret_address: int
    addresses: tuple[int, ...]
    """Address of each tensor; 0 if it cannot be read this way: not dense, empty, or on a device."""


class Opened:
    """The source's side. Must be kept alive while other ranks read."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._secret = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        self.window = Window(
            pid=os.getpid(),
            secret=self._secret.raw.hex(),
            secret_address=ctypes.addressof(self._secret),
            addresses=tuple([t.data_ptr() if movable(t) else 0 for t in tensors]),  # of an empty one it is 0
        )


@contextlib.contextmanager
def open_to_readers(tensors: Sequence[torch.Tensor]) -> Iterator[Window]:
    """Where Yama restricts ptrace to children, lift that within the context."""
    opened = Opened(tensors)
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        yield opened.window
    finally:
        _libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def can_read(window: Window) -> bool:
    """Whether this process can read the source's memory, tested on its secret."""
    found = ctypes.create_string_buffer(16)
    vectors = [(ctypes.addressof(found), window.secret_address, 16)]
    return _read(window.pid, vectors) == 16 and found.raw.hex() == window.secret


def pull(
    tensors: Sequence[torch.Tensor], addresses: Sequence[int], pid: int, check: Callable[[], None] = lambda: None
) -> list[int]:
    """Fill `tensors` from `addresses` of process `pid`. Returns the same digests as `digests` at the source.

    Raises DistNetworkError if the source is gone.
    """
    found: list[int] = []
    staging: torch.Tensor | None = None
    gathered: torch.Tensor | None = None
    nbytes_of = [tensor.nbytes for tensor in tensors]
    for group in _groups(nbytes_of):
        hasher = xxhash.xxh3_64()
        if len(group) > 1 and all(tensors[i].is_contiguous() for i in group):
            gathered = torch.empty(PIECE_BYTES, dtype=torch.uint8) if gathered is None else gathered
            sizes = [nbytes_of[i] for i in group]
            row = _Vector(gathered.data_ptr(), sum(sizes))
            _fetch_vectors(pid, row, 1, _vectors([addresses[i] for i in group], sizes), len(sizes), row.length)
            hasher.update(_memory(gathered[: row.length]))
            # To the tensors by a read of this process's own memory: one call, in place of one for each tensor.
            here = _vectors([tensors[i].data_ptr() for i in group], sizes)
            _fetch_vectors(os.getpid(), here, len(sizes), row, 1, row.length)
        else:
            for i in group:
                tensor, size = tensors[i], tensors[i].element_size()
                step = PIECE_BYTES // size
                for start in range(0, tensor.numel(), step):
                    count = min(step, tensor.numel() - start)
                    if tensor.is_contiguous():
                        piece = byte_view(tensor)[start * size : (start + count) * size]
                    else:
                        staging = torch.empty(PIECE_BYTES, dtype=torch.uint8) if staging is None else staging
                        piece = staging[: count * size]
                    _fetch(pid, [(piece.data_ptr(), addresses[i] + start * size, count * size)])
                    hasher.update(_memory(piece))
                    if not tensor.is_contiguous():
                        _spread(tensor, start, count, piece)
                    check()
        found.append(_signed(hasher.intdigest()))
        check()
    return found


def digests(tensors: Sequence[torch.Tensor], check: Callable[[], None] = lambda: None) -> list[int]:
    """xxh3 of each group of dense `tensors`, in the order in which `pull` reads them."""
    found = []
    gathered: torch.Tensor | None = None
    nbytes_of = [tensor.nbytes for tensor in tensors]
    for group in _groups(nbytes_of):
        hasher = xxhash.xxh3_64()
        if len(group) > 1:
            gathered = torch.empty(PIECE_BYTES, dtype=torch.uint8) if gathered is None else gathered
            first = at = gathered.data_ptr()
            for i in group:
                nbytes = nbytes_of[i]
                ctypes.memmove(at, tensors[i].data_ptr(), nbytes)
                at += nbytes
            found.append(_signed(xxhash.xxh3_64_intdigest(_memory(gathered[: at - first]))))
            check()
            continue
        for i in group:
            data = byte_view(tensors[i])
            for start in range(0, data.numel(), PIECE_BYTES):
                hasher.update(_memory(data[start : start + PIECE_BYTES]))
                check()
        found.append(_signed(hasher.intdigest()))
    return found


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Groups of indices: small tensors together, as many as one call reads; large ones separately."""
    group: list[int] = []
    total = 0
    for index, nbytes in enumerate(sizes):
        if nbytes > PIECE_BYTES:
            yield [index]
            continue
        if group and (total + nbytes > PIECE_BYTES or len(group) == MOST_VECTORS):
            yield group
            group, total = [], 0
        group.append(index)
        total += nbytes
    if group:
        yield group


def _spread(tensor: torch.Tensor, start: int, count: int, piece: torch.Tensor) -> None:
    offset = 0
    for part in row_major(tensor, start, count):
        nbytes = part.numel() * part.element_size()
        part.copy_(piece[offset : offset + nbytes].view(tensor.dtype).view(part.shape))
        offset += nbytes


def _fetch(pid: int, vectors: Sequence[tuple[int, int, int]]) -> None:
    """Read all of `vectors`, each (local address, remote address, bytes). Raises DistNetworkError."""
    total = sum(nbytes for _, _, nbytes in vectors)
    if (came := _read(pid, vectors)) != total:
        raise dist.DistNetworkError(f"process {pid}, the source of the state, is gone: read {came} of {total} bytes")


def _vectors(addresses: Sequence[int], sizes: Sequence[int]) -> Any:
    """An array of `_Vector`, without a Python object for each."""
    vectors = np.empty((len(sizes), 2), dtype=np.uint64)
    vectors[:, 0], vectors[:, 1] = addresses, sizes
    return (_Vector * len(sizes)).from_buffer(vectors.data)


def _fetch_vectors(pid: int, here: Any, here_count: int, there: Any, there_count: int, total: int) -> None:
    """Read the pieces `there` of process `pid` into the pieces `here`. Raises DistNetworkError."""
    if (came := int(_process_vm_readv(pid, here, here_count, there, there_count, 0))) != total:
        raise dist.DistNetworkError(f"process {pid}, the source of the state, is gone: read {came} of {total} bytes")


def _read(pid: int, vectors: Sequence[tuple[int, int, int]]) -> int:
    count = len(vectors)
    here = (_Vector * count)(*(_Vector(ours, nbytes) for ours, _, nbytes in vectors))
    there = (_Vector * count)(*(_Vector(theirs, nbytes) for _, theirs, nbytes in vectors))
    return int(_process_vm_readv(pid, here, count, there, count, 0))


_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def _memory(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >> 63 else digest
