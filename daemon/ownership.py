"""Directories and files of the daemon that no other user of the machine may change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import CannotStart

STICKY_WRITABLE = stat.S_ISVTX | stat.S_IWOTH


def private(folder: Path) -> None:
    """Create `folder`, if it does not exist, for this user only (mode 0700). Raises CannotStart if it is a link or
    belongs to another user."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise CannotStart(f"{folder}: {error.strerror}") from error
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CannotStart(f"{folder}: {error.strerror} (it must be a folder, and no link)") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise CannotStart(f"{folder} belongs to uid {found.st_uid}: it must be uid {os.geteuid()}'s own")
        if found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def trusted(folder: Path, setting: str) -> None:
    """Refuse a directory that another user could change or replace. Raises CannotStart with the remedy.

    Directories of root and of this user are trusted. A world-writable one is trusted only above `folder` and with the
    sticky bit, which keeps the names in it to their owners. The directories above are checked for root only: in a
    user's container they may show any owner.
    """
    mine = {0, os.geteuid()}
    above = Path(os.path.realpath(folder)).parents if os.geteuid() == 0 else ()
    for place in (folder, *above):
        try:
            found = os.stat(place)
        except OSError as error:
            raise CannotStart(f"{setting} = {str(folder)!r}: {place}: {error.strerror}") from error
        open_to_all = found.st_mode & stat.S_IWOTH and (place == folder or not found.st_mode & stat.S_ISVTX)
        if found.st_uid not in mine or open_to_all:
            why = "everyone may write to" if open_to_all else f"uid {found.st_uid} owns"
            raise CannotStart(
                f"{setting} = {str(folder)!r}: {why} {place}, and could replace what elasticd keeps there; take a "
                f"folder of uid {os.geteuid()}'s own"
            )


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: its reader sees the old or the new. Readable by this user only; links are never
    followed. Raises OSError."""
    aside = path.with_name(f".{path.name}.new")
    try:
        os.unlink(aside)
    except FileNotFoundError:
        pass
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(aside, flags, 0o600), "wb") as file:
        file.write(content)
    os.replace(aside, path)
