"""A lock for `prepare_data`: what the first process of a machine downloads, the others find."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def one_at_a_time(job: str) -> Iterator[None]:
    """One process of this user, machine and job at a time.

    The lock is a folder that only this user can open, in $XDG_RUNTIME_DIR or else in the folder for temporary files; it
    is removed at the end. Raises PermissionError if another user has made one of that name.
    """
    digest = hashlib.sha256(os.fsencode(job)).hexdigest()[:16]  # a standalone job has any name
    path = os.path.join(_base(), f"elastic-prepare-{os.geteuid()}-{digest}")
    while (descriptor := _locked(path)) is None:
        pass  # another process has removed what this one waited for: as many turns as there are others
    try:
        yield
    finally:
        with suppress(OSError):  # a cleaner of temporary files may be sooner
            os.rmdir(path)
        os.close(descriptor)


def _base() -> str:
    """A session's folder belongs to its user alone; where there is none, or another user's (sudo), the one for all."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):
        if runtime and _private(os.stat(runtime)):
            return runtime
    return tempfile.gettempdir()


def _private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0


def _locked(path: str) -> int | None:
    """A descriptor of the folder with its lock held; None if the folder was removed meanwhile."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:  # a link, a file, a folder that this user cannot open
        raise PermissionError(_refusal(path)) from None
    if not _private(os.fstat(descriptor)):
        os.close(descriptor)
        raise PermissionError(_refusal(path))
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
            return descriptor
    os.close(descriptor)
    return None


def _refusal(path: str) -> str:
    return (
        f"{path} is to be the lock of prepare_data, and is not a folder of user {os.geteuid()} alone: "
        "remove it, or set TMPDIR to a folder of your own"
    )
