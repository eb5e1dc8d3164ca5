"""Directories that other users write to, read without following a link out of them: openat(2) from one of our own."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic.util.files import read_descriptor

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: opening a named pipe must not wait for a writer."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The directory `names` below `root`, each in the one before. `root` is trusted and opened as it is; no name below
    it may be a symbolic link, since a worker may have replaced its directory by one."""

    root: Path
    names: tuple[str, ...] = ()

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the directory. Raises OSError: FileNotFoundError, or NotADirectoryError for a link."""
        descriptor = os.open(self.root, _DIRECTORY)
        try:
            for name in self.names:
                below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def owner(self) -> int | None:
        """User id of its owner; None if it does not exist, or is not reached without a link."""
        try:
            with self.opened() as descriptor:
                return os.fstat(descriptor).st_uid
        except (FileNotFoundError, NotADirectoryError):
            return None


def open_file(folder: int, name: str) -> int:
    """A descriptor of a regular file in the directory of descriptor `folder`, for reading.

    Raises OSError: FileNotFoundError, or PermissionError for a link or another non-regular file.
    """
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise PermissionError(f"{name} is no regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermissionError(f"{name} is no regular file")
    return descriptor


def read_file(folder: Folder, name: str, most_bytes: int) -> bytes:
    """A whole file in a directory that another user writes to. Raises OSError: for a link on the way, for no regular
    file, and FileTooLarge."""
    with folder.opened() as opened:
        descriptor = open_file(opened, name)
        try:
            return read_descriptor(descriptor, most_bytes, name)
        finally:
            os.close(descriptor)


def regular_files(folder: int) -> Iterator[tuple[int, str]]:
    """(mtime in nanoseconds, name) of each regular file, without links."""
    for name in os.listdir(folder):
        try:
            entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue  # removed since it was listed
        if stat.S_ISREG(entry.st_mode):
            yield entry.st_mtime_ns, name
