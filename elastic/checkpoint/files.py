"""The one seam to the file system: every call that can fail, or after which the process can die, is a method here.

Tests put a file system in its place that fails or dies at the n-th call, for every n.
"""

from __future__ import annotations

import errno
import fcntl
import os

_NO_RESERVE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.ENODEV}


class Files:
    """The real one. Methods raise OSError."""

    def mkdir(self, path: str) -> None:
        """One folder; it may be there already. Durable once its parent is synced."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def create(self, path: str, *, direct: bool = False) -> int:
        """A descriptor of a new, empty file. `direct` asks for O_DIRECT; a file system without it gets plain writes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, flags, 0o644)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Take the disk space now, so that a full disk shows before anything is written."""
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_RESERVE:
                raise

    def write_at(self, fd: int, data: memoryview, at: int) -> None:
        """All of `data`, at offset `at`."""
        while data:
            try:
                done = os.pwrite(fd, data, at)
            except OSError as error:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # Refused only now (some network and overlay file systems), or a short write left it unaligned.
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            data, at = data[done:], at + done

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems refuse; they have nothing to sync
                raise
        finally:
            os.close(fd)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted; empty for a folder that does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def identity(self, path: str) -> tuple[int, int] | None:
        """Tells one file or folder from another that took its name; None when there is nothing of that name."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def size(self, path: str) -> int:
        return os.stat(path).st_size


REAL = Files()
