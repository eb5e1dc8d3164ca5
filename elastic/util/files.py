"""Small files: written whole or not at all, read without being led elsewhere by a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_READ_BYTES = 4 * 1024 * 1024


def replace_file(path: Path, content: bytes, owner: tuple[int, int] | None = None, mode: int = 0o600) -> None:
    """Replace a file atomically: its reader sees the old or the new. `owner`: its (uid, gid), else this user's; links
    are never followed. Raises OSError."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.new")
    with open(_new_file(aside, mode), "wb", buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        if owner is not None:
            os.fchown(file.fileno(), *owner)
    os.replace(aside, path)


def _new_file(path: str, mode: int) -> int:
    """A descriptor of a new file, in place of the one that a replacement which was cut off has left."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, mode)


def read_file(path: Path, most_bytes: int = MAX_READ_BYTES, *, from_end: bool = False) -> bytes:
    """The beginning or the end of a file that another user may have written. Raises OSError, also for a link or a pipe
    in its place: a link may lead to a file that the other may not read, a pipe would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is no regular file")
        if from_end:
            file.seek(max(0, found.st_size - most_bytes))
        return file.read(most_bytes)


def last_line(path: Path, most_bytes: int) -> str:
    """The last line of a file, as far as its last `most_bytes` hold it. Raises OSError."""
    return read_file(path, most_bytes, from_end=True).decode(errors="replace").strip().rpartition("\n")[2]
