"""File system access of this package: every call that can fail, or after which the process can die, is a method here.

Tests substitute a file system that fails or dies at the n-th call, for every n.

The directory may belong to another user than this process, which is often root. So every name is resolved relative to a
descriptor of its directory (openat(2)), files are created new and never opened through a symbolic link, and a link on
the way to a directory is followed only if it cannot lead this process to a place that the link's owner may not write to
(`open_folder`). The directory's owner can still remove or replace its contents.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections import deque
from collections.abc import Iterator

from elastic.util.files import closed_after, read_descriptor

_NO_RESERVE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.ENODEV}


FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""Weights are readable only by the owner and the group (the directory's group, if it is setgid)."""
METADATA_BYTES = 256 * 1024 * 1024
"""Of a manifest, or of a shard's note, at most: written and read whole."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
"""Symbolic links on one path, as in Linux."""


def open_folder(path: str) -> int:
    """A descriptor (O_PATH) of a directory. Raises OSError; PermissionError for an untrusted link.

    A symbolic link owned by root or this user is followed. A link of another user is followed only to a directory of
    that same user: otherwise its owner could choose where this process writes.
    """
    todo = deque(os.path.abspath(path).split("/"))
    links = 0
    folder = os.open("/", _FOLDER)
    try:
        while todo:
            name = todo.popleft()
            if not name:
                continue
            try:
                below = os.open(name, _FOLDER, dir_fd=folder)
            except NotADirectoryError:
                links += 1
                below, rest = _follow(folder, name, path, links)
                todo.extendleft(reversed(rest))
            os.close(folder)
            folder = below
    except (OSError, ValueError):  # ValueError: a NUL in the path
        os.close(folder)
        raise
    return folder


def _follow(folder: int, name: str, path: str, links: int) -> tuple[int, list[str]]:
    """Resolve `name`, which is not a directory: a descriptor, and the names that remain to be walked from it."""
    with closed_after(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as link:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if status.st_uid in (0, os.geteuid()):
            target = os.readlink("", dir_fd=link)
            return os.open("/" if target.startswith("/") else ".", _FOLDER, dir_fd=folder), target.split("/")
    below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    if os.fstat(below).st_uid != status.st_uid:
        os.close(below)
        raise PermissionError(
            errno.EPERM, f"{name} is a link of uid {status.st_uid} to a folder that is not theirs: not followed", path
        )
    return below, []


@contextlib.contextmanager
def _in_folder(path: str) -> Iterator[tuple[int, str]]:
    """(descriptor of the directory that contains `path`, name in it)."""
    above, name = os.path.split(os.path.abspath(path))
    with closed_after(open_folder(above)) as folder:
        yield folder, name


def open_file(path: str) -> int:
    """A descriptor of a regular file, for reading. Raises OSError; PermissionError for a link or a pipe."""
    with _in_folder(path) as (folder, name):
        try:
            # O_NONBLOCK: opening a named pipe must not wait for a writer.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise PermissionError(errno.EPERM, "is a link, not a regular file: not read", path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(errno.EPERM, "is no regular file: not read", path)
    return fd


class Files:
    """The real file system. Methods raise OSError."""

    def mkdir(self, path: str) -> None:
        """Create one directory; it may exist already. Durable once its parent is synced."""
        try:
            with _in_folder(path) as (folder, name):
                os.mkdir(name, FOLDER_MODE, dir_fd=folder)
        except FileExistsError:
            os.close(open_folder(path))

    def create(self, path: str, *, direct: bool = False) -> int:
        """A descriptor of a new, empty file, which replaces one of the same name. `direct` asks for O_DIRECT; a file
        system without it gets plain writes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _in_folder(path) as (folder, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            if direct:
                try:
                    return os.open(name, flags | os.O_DIRECT, FILE_MODE, dir_fd=folder)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                with contextlib.suppress(FileNotFoundError):  # some file systems create it before they refuse
                    os.unlink(name, dir_fd=folder)
            return os.open(name, flags, FILE_MODE, dir_fd=folder)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Allocate the disk space now, so that a full disk fails before anything is written."""
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_RESERVE:
                raise

    def write_at(self, fd: int, data: memoryview, at: int) -> None:
        """Write all of `data` at offset `at`."""
        while data:
            try:
                done = os.pwrite(fd, data, at)
            except OSError as error:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # O_DIRECT refused only now (some network and overlay file systems), or a short write left the offset
                # unaligned.
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
        with _in_folder(old) as (from_folder, from_name), _in_folder(new) as (to_folder, to_name):
            os.rename(from_name, to_name, src_dir_fd=from_folder, dst_dir_fd=to_folder)

    def unlink(self, path: str) -> None:
        with _in_folder(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def rmdir(self, path: str) -> None:
        with _in_folder(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    def sync_dir(self, path: str) -> None:
        with closed_after(_readable_folder(path)) as fd:
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some network file systems refuse; they have nothing to sync
                    raise

    def read(self, path: str) -> bytes:
        """A whole file of metadata. Raises FileTooLarge for more than METADATA_BYTES."""
        with closed_after(open_file(path)) as fd:
            return read_descriptor(fd, METADATA_BYTES, os.path.basename(path))

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted; empty for a directory that does not exist."""
        try:
            fd = _readable_folder(path)
        except FileNotFoundError:
            return []
        with closed_after(fd):
            return sorted(os.listdir(fd))

    def identity(self, path: str) -> tuple[int, int] | None:
        """(device, inode), to tell a file or directory from a later one of the same name; None if it does not exist."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def owner(self, path: str) -> int | None:
        """The user id that owns a file or directory; None if it does not exist."""
        try:
            return os.stat(path, follow_symlinks=False).st_uid
        except FileNotFoundError:
            return None

    def size(self, path: str) -> int:
        with _in_folder(path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size


def _readable_folder(path: str) -> int:
    with closed_after(open_folder(path)) as folder:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)


REAL = Files()
"""What this package uses. Tests put another one in its place."""
