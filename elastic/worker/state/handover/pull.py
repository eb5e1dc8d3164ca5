"""A short cut beside `broadcast`: ranks on the source's host read the state directly from its memory, without a socket.

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

from elastic.worker.comm.p2p import memory_of

from .broadcast import byte_view, pieces, signed

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


@contextlib.contextmanager
def open_to_readers(addresses: Sequence[int]) -> Iterator[Window]:
    """`addresses` of the tensors, as `Window` has them. Where Yama restricts ptrace to children, lift that within the
    context."""
    secret = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        yield Window(os.getpid(), secret.raw.hex(), ctypes.addressof(secret), tuple(addresses))
    finally:
        _libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def can_read(window: Window) -> bool:
    """Whether this process can read the source's memory, tested on its secret."""
    found = ctypes.create_string_buffer(16)
    here, there = _vectors([ctypes.addressof(found)], [16]), _vectors([window.secret_address], [16])
    return _read(window.pid, here, there) == 16 and found.raw.hex() == window.secret


def pull(
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    sizes: Sequence[int],
    pid: int,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Fill `tensors`, of `sizes` bytes, from `addresses` of process `pid`. Returns the same digests as `digests` at the
    source.

    Raises DistNetworkError if the source is gone.
    """
    hashes: list[int] = []
    staging = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for group in _groups(sizes):
        into = [tensors[i] for i in group]
        if len(group) > 1 and all(map(torch.Tensor.is_contiguous, into)):
            lengths = [sizes[i] for i in group]
            total = sum(lengths)
            row = _vectors([staging.data_ptr()], [total])
            _fetch(pid, row, _vectors([addresses[i] for i in group], lengths), total)
            hashes.append(xxhash.xxh3_64_intdigest(memory_of(staging[:total])))
            # To the tensors by a read of this process's own memory: one call, in place of one for each tensor.
            _fetch(os.getpid(), _vectors([tensor.data_ptr() for tensor in into], lengths), row, total)
            check()
            continue
        hasher = xxhash.xxh3_64()
        for i in group:
            tensor, size = tensors[i], tensors[i].element_size()
            step = PIECE_BYTES // size
            for start in range(0, tensor.numel(), step):
                count = min(step, tensor.numel() - start)
                if tensor.is_contiguous():
                    piece = byte_view(tensor)[start * size : (start + count) * size]
                else:
                    piece = staging[: count * size]
                nbytes = [count * size]
                _fetch(
                    pid, _vectors([piece.data_ptr()], nbytes), _vectors([addresses[i] + start * size], nbytes), *nbytes
                )
                hasher.update(memory_of(piece))
                if not tensor.is_contiguous():
                    for view, read in pieces(tensor, start, count, piece):
                        view.copy_(read)
                check()
        hashes.append(hasher.intdigest())
    return list(map(signed, hashes))


def digests(addresses: Sequence[int], sizes: Sequence[int], check: Callable[[], None] = lambda: None) -> list[int]:
    """xxh3 of each group of dense tensors of this process, by address and bytes, in the order in which `pull` reads
    them. The caller keeps them alive."""
    hashes = []
    staging = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for group in _groups(sizes):
        if len(group) > 1:
            first = at = staging.data_ptr()
            for i in group:
                ctypes.memmove(at, addresses[i], sizes[i])
                at += sizes[i]
            hashes.append(xxhash.xxh3_64_intdigest(memory_of(staging[: at - first])))
            check()
            continue
        hasher, nbytes = xxhash.xxh3_64(), sizes[group[0]]
        for start in range(0, nbytes, PIECE_BYTES):
            piece = ctypes.c_char * min(PIECE_BYTES, nbytes - start)
            hasher.update(memoryview(piece.from_address(addresses[group[0]] + start)))
            check()
        hashes.append(hasher.intdigest())
    return list(map(signed, hashes))


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


def _vectors(addresses: Sequence[int], sizes: Sequence[int]) -> Any:
    """An array of `_Vector`, without a Python object for each."""
    vectors = np.empty((len(sizes), 2), dtype=np.uint64)
    vectors[:, 0], vectors[:, 1] = addresses, sizes
    return (_Vector * len(sizes)).from_buffer(vectors.data)


def _fetch(pid: int, here: Any, there: Any, total: int) -> None:
    """Read the pieces `there` of process `pid` into the pieces `here`. Raises DistNetworkError."""
    if (came := _read(pid, here, there)) != total:
        raise dist.DistNetworkError(f"process {pid}, the source of the state, is gone: read {came} of {total} bytes")


def _read(pid: int, here: Any, there: Any) -> int:
    return int(_process_vm_readv(pid, here, len(here), there, len(there), 0))


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
