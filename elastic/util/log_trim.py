"""Limits the disk space of a log that another process is writing.

A log that has grown too large loses its middle: a hole is punched into the file, so that the beginning (how it
started) and the newest lines stay where they are and nothing that is being written is lost. Reading a hole returns
zero bytes; log viewers leave them out.
"""

from __future__ import annotations

import ctypes
import os

from .files import closed_after

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
BLOCK_BYTES = 4096
HEAD_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def trim(path: str | os.PathLike[str], limit_bytes: int) -> int:
    """Free the middle of `path` when it takes more than `limit_bytes` on disk. Returns the bytes freed.

    Half of the limit is for the newest part. Raises OSError (EOPNOTSUPP where the file system has no holes).
    """
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return 0
    if stat.st_blocks * 512 <= limit_bytes:
        return 0
    begin = -(-min(HEAD_BYTES, limit_bytes // 4) // BLOCK_BYTES) * BLOCK_BYTES  # rounded up
    end = (stat.st_size - limit_bytes // 2) // BLOCK_BYTES * BLOCK_BYTES
    if end <= begin:
        return 0
    with closed_after(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor:
        if _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(path))
    return stat.st_blocks * 512 - os.stat(path).st_blocks * 512
