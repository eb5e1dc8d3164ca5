"""How an agent that runs as another user reaches etcd: copies of what only elasticd's own user may read.

    <state_dir>/access/<uid>/              that user's own, mode 0700
    <state_dir>/access/<uid>/ca.pem, cert.pem, key.pem
    <state_dir>/access/<uid>/client-0      the embedded etcd's socket: a second name of the same file
    <state_dir>/access/<uid>/login         its login for agents, a copy

They are renewed when the originals change, and removed with the user's last agent on this node; anything else that the
user put into the folder stays there. docs/security.md says what a user can do with them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastic.contract.agent_files import EtcdAccess
from elastic.etcd.login import NAME as LOGIN
from elastic.util.files import closed_after, read_file, replace_file
from elasticd.access.authority import Account
from elasticd.base import ownership
from elasticd.base.errors import CannotStart
from elasticd.base.folders import Folder
from elasticd.base.log import Log

FILES = {"ca_file": "ca.pem", "cert_file": "cert.pem", "key_file": "key.pem"}
SOCKET = "unix:"
MOST_LINKS = 16
"""An elasticd with other endpoints may have left so many."""
Version = tuple[tuple[int, int], ...]


class EtcdGrants:
    """Used by the loop's thread only."""

    def __init__(self, state_dir: Path, access: EtcdAccess, log: Log) -> None:
        self._root = state_dir / "access"
        self._access = access
        self._log = log
        self._granted: dict[int, Version] = {}

    def of(self, user: Account) -> EtcdAccess:
        """Access for the agents of `user`. Raises CannotStart, OSError."""
        self._write(user.uid, user.gid)
        folder = self._root / str(user.uid)
        files = {field: str(folder / name) for field, name in FILES.items() if getattr(self._access, field)}
        ours = self._access.endpoints
        endpoints = tuple(f"{SOCKET}{folder / _link(i)}" if e.startswith(SOCKET) else e for i, e in enumerate(ours))
        return msgspec.structs.replace(self._access, endpoints=endpoints, **files)

    def renew(self, users: Mapping[int, int]) -> None:
        """Copy again what has changed, for the users (uid -> gid) that have agents here; remove what others have."""
        there = os.listdir(self._root) if self._root.is_dir() else []
        for name in {*there, *map(str, users)}:
            uid = int(name) if name.isdigit() else -1
            try:
                if uid not in users:
                    self._granted.pop(uid, None)
                    self._remove(name)
                elif self._granted.get(uid) != self._version():
                    self._write(uid, users[uid])
            except (OSError, CannotStart) as error:
                # E.g. etcd has just ended: the next turn tries again. Or a user has put something in the way: that
                # must not keep the others from theirs.
                self._log.debug("access.not_renewed", uid=uid, why=str(error))

    def _remove(self, name: str) -> None:
        """What elasticd put into the folder, and the folder, unless its user keeps other things there: however many
        and deep these are, the loop does not wait for them. Raises OSError."""
        ours = [*FILES.values(), LOGIN, *(_link(i) for i in range(max(MOST_LINKS, len(self._access.endpoints))))]
        with Folder(self._root, (name,)).opened() as folder:
            for each in ours:
                for path in (each, _aside(each)):
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(path, dir_fd=folder)
        os.rmdir(self._root / name)

    def _write(self, uid: int, gid: int) -> None:
        version = self._version()
        ownership.searchable(self._root)
        folder = self._root / str(uid)
        ownership.given(folder, uid, gid, 0o700)
        for field, name in FILES.items():
            if source := getattr(self._access, field):
                replace_file(folder / name, Path(source).read_bytes(), (uid, gid))
        for i, endpoint in enumerate(self._access.endpoints):
            if endpoint.startswith(SOCKET):
                login = Path(endpoint.removeprefix(SOCKET)).with_name(LOGIN)
                if login.exists():
                    replace_file(folder / LOGIN, read_file(login), (uid, gid))
                _second_name(Path(endpoint.removeprefix(SOCKET)), folder / _link(i))
        self._granted[uid] = version

    def _version(self) -> Version:
        """Changes with the originals. Raises OSError."""
        files = [getattr(self._access, field) for field in FILES]
        sockets = [e.removeprefix(SOCKET) for e in self._access.endpoints if e.startswith(SOCKET)]
        entry = (os.stat(path) for path in [*files, *sockets] if path)
        return tuple((stat.st_ino, stat.st_mtime_ns) for stat in entry)


def _link(number: int) -> str:
    return f"client-{number}"


def _aside(name: str) -> str:
    """What a file or link is called until it is complete."""
    return f".{name}.new"


def _second_name(socket: Path, name: Path) -> None:
    """A hard link: processes that may search the folder of `name` can then connect, and no others: only
    elasticd's own user may enter the folder of the socket itself."""
    # etcd's user owns the socket, and might have put a link to a file of root's in its place
    with closed_after(os.open(socket, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise CannotStart(f"{socket} is no socket")
        os.chmod(f"/proc/self/fd/{descriptor}", 0o666)
    aside = name.with_name(_aside(name.name))
    for path in (aside, name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    os.link(socket, aside, follow_symlinks=False)
    os.rename(aside, name)
