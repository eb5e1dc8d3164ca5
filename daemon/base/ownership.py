"""Directories and files of the daemon that no other user of the machine may change."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from .errors import CannotStart

NOBODY = 65534


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
        entry = os.fstat(descriptor)
        if entry.st_uid != os.geteuid():
            raise CannotStart(f"{folder} belongs to uid {entry.st_uid}: it must be uid {os.geteuid()}'s own")
        if entry.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def lent(folder: Path, gid: int, mode: int) -> None:
    """Create `folder`, of this user, for a group. Raises OSError; CannotStart if it is a link or another user's."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    entry = os.lstat(folder)
    if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid():
        raise CannotStart(f"{folder} must be a folder, and uid {os.geteuid()}'s own")
    if (entry.st_gid, stat.S_IMODE(entry.st_mode)) != (gid, mode):
        os.chown(folder, -1, gid)
        os.chmod(folder, mode)


def trusted(folder: Path, setting: str) -> None:
    """Refuse a directory that another user could change or replace. Raises CannotStart with the remedy.

    Directories of root and of this user are trusted. A world-writable one is trusted only above `folder` and with the
    sticky bit, which keeps the names in it to their owners. The directories above are checked for root only: in a
    user's container they may show any owner.
    """
    trusted_uids = {0, os.geteuid()}
    above = Path(os.path.realpath(folder)).parents if os.geteuid() == 0 else ()
    for place in (folder, *above):
        try:
            entry = os.stat(place)
        except OSError as error:
            raise CannotStart(f"{setting} = {str(folder)!r}: {place}: {error.strerror}") from error
        open_to_all = entry.st_mode & stat.S_IWOTH and (place == folder or not entry.st_mode & stat.S_ISVTX)
        if entry.st_uid not in trusted_uids or open_to_all:
            why = "everyone may write to" if open_to_all else f"uid {entry.st_uid} owns"
            raise CannotStart(
                f"{setting} = {str(folder)!r}: {why} {place}, and could replace what elasticd keeps there; take a "
                f"folder of uid {os.geteuid()}'s own"
            )


def trusted_program(program: str, setting: str) -> None:
    """Refuse a program that another user could change or replace, and that root is to run. Raises CannotStart."""
    if os.geteuid() != 0:
        return
    where = Path(os.path.realpath(program))
    trusted(where.parent, f"the folder of {setting}")
    entry = where.stat()
    if entry.st_uid != 0 or entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotStart(
            f"{setting} = {program!r}: other users may change it, and root would run it: "
            f"chown root {where}; chmod go-w {where}"
        )


def searchable(folder: Path) -> None:
    """Create `folder`, of this user, in which other users may open what they know the name of (mode 0711). Raises
    CannotStart, also if other users do not get as far as this folder."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise CannotStart(f"{folder} must be a folder, and uid {os.geteuid()}'s own")
    folder.chmod(0o711)
    for place in folder.parents:
        if not place.stat().st_mode & stat.S_IXOTH:
            raise CannotStart(f"{place}: agents that run as their job's user cannot enter it: chmod o+x {place}")


def given(folder: Path, uid: int, gid: int, mode: int) -> None:
    """Create `folder` for another user; its parent must be this user's. Raises CannotStart if it exists and is not a
    folder of that user."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        entry = os.lstat(folder)
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != uid:
            raise CannotStart(f"{folder} belongs to uid {entry.st_uid}, not to uid {uid}") from None
        return
    os.chmod(folder, mode)
    os.chown(folder, uid, gid, follow_symlinks=False)


def closed_to(program: str, uid: int = NOBODY, groups: Collection[int] = ()) -> str:
    """Why a user cannot run `program`: the first place on its way, links followed, that is closed to that user; '' if
    there is none. Without `uid`: a user who owns nothing. An access list that may say otherwise is not judged."""
    real = Path(os.path.realpath(program))
    for place in (*reversed(Path(program).absolute().parents), *reversed(real.parents), real):
        try:
            entry = os.stat(place)
            judged = "system.posix_acl_access" not in os.listxattr(place)
        except OSError as error:
            return f"{place}: {error.strerror}"
        shift = 6 if entry.st_uid == uid else 3 if entry.st_gid in groups else 0
        if judged and not entry.st_mode >> shift & stat.S_IXOTH:
            link = f" ({program} leads there)" if place not in Path(program).absolute().parents else ""
            return f"other users cannot enter {place}{link}" if place != real else f"other users cannot run {real}"
    return ""


OPEN_PYTHON = (
    "make the virtual environment with a Python that all users can run: /usr/bin/python3 -m venv /opt/elasticd"
)
