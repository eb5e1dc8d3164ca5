"""Small files: written whole or not at all, read without being led elsewhere by a link."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

MAX_READ_BYTES = 4 * 1024 * 1024


def replace_file(
    path: Path, content: bytes, owner: tuple[int, int] | None = None, mode: int = 0o600, *, synced: bool = False
) -> None:
    """Replace a file atomically: its reader sees the old or the new. `owner`: its (uid, gid), else this user's; links
    are never followed. `synced`: one of them is there also after a loss of power. Raises OSError."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.new")
    with open(_new_file(aside, mode), "wb", buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        if owner is not None:
            os.fchown(file.fileno(), *owner)
        if synced:
            os.fsync(file.fileno())
    os.replace(aside, path)


def _new_file(path: str, mode: int) -> int:
    """A descriptor of a new file, in place of the one that a replacement which was cut off has left."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, mode)


def locked_within(file: IO[Any], limit_s: float) -> bool:
    """Lock an open file, which flock does without a time-out. Returns False if another process holds it for longer."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            threading.Event().wait(0.01)


@contextmanager
def closed_after(descriptor: int) -> Iterator[int]:
    """`descriptor`, which is closed at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class FileTooLarge(OSError):
    """A file has more than its reader takes."""


def read_file(path: Path, most_bytes: int = MAX_READ_BYTES, *, from_end: bool = False) -> bytes:
    """A file that another user may have written, or its last `most_bytes`. Raises OSError: FileTooLarge, and also for a
    link or a pipe in its place. A link may lead to a file that the other may not read, a pipe would wait for a writer.
    """
    with closed_after(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is no regular file")
        if from_end:
            return os.pread(descriptor, most_bytes, max(0, status.st_size - most_bytes))
        return read_descriptor(descriptor, most_bytes, str(path))


def read_descriptor(descriptor: int, most_bytes: int, name: str) -> bytes:
    """All of an open regular file. `name`: for the error. Raises OSError, and FileTooLarge before anything of a file is
    read that has more: a sparse one costs its owner nothing."""
    if (nbytes := os.fstat(descriptor).st_size) <= most_bytes:
        content = bytearray()
        while piece := os.read(descriptor, most_bytes + 1 - len(content)):  # it may grow meanwhile
            content += piece
        nbytes = len(content)
        if nbytes <= most_bytes:
            return bytes(content)
    raise FileTooLarge(errno.EFBIG, f"{name} has {nbytes} bytes, and {most_bytes} at most are read")


def last_line(path: Path, most_bytes: int) -> str:
    """The last line of a file, as far as its last `most_bytes` hold it. Raises OSError."""
    return read_file(path, most_bytes, from_end=True).decode(errors="replace").strip().rpartition("\n")[2]
