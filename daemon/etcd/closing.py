"""The embedded etcd is elasticd's alone: its root administers it, daemons and agents read and write records, and others
have no login. A job's user who has the agents' login cannot add users, or turn the authentication on or off.

    <state_dir>/etcd/login         of daemons and agents: see `elastic.etcd.login`
    <state_dir>/etcd/root-login    of etcd's root, for this module, and for `etcdctl --user "$(cat …)"`

Both are for elasticd's own user; a job's user gets a copy of the first (`etcd_grants`).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from elastic.etcd import admin
from elastic.etcd.login import NAME
from elastic.etcd.types import EtcdDenied, EtcdError, EtcdUnavailable
from elastic.util.files import closed_after, read_file, replace_file
from elasticd.base.log import Log

PREFIX = "/elastic/"
ROOT_NAME = "root-login"
AGAIN_S = 60.0
"""Pause between attempts while etcd refuses our own login."""


class Closing:
    """Used by one thread, but for `prepare`."""

    def __init__(self, state_dir: Path, endpoint: str, stays_open: bool, log: Log) -> None:
        """`stays_open`: other nodes reach it in plain text, as etcd.insecure allows."""
        self._state_dir, self._endpoint, self._stays_open, self._log = state_dir, endpoint, stays_open, log
        self._said = ""

    def prepare(self) -> None:
        """Make the logins, before any process that may use them is started. Raises OSError."""
        for name, user in ((ROOT_NAME, admin.ROOT), (NAME, admin.USER)):
            path = self._state_dir / "etcd" / name
            if not path.exists():
                replace_file(path, f"{user}:{secrets.token_hex(32)}\n".encode())
                _sync(path)  # etcd keeps the passwords, and so must we
                _sync(path.parent)

    def attempt(self) -> float | None:
        """Close etcd, unless it is closed. Returns in how many seconds to try again; None: it is done."""
        try:
            root = self._password(ROOT_NAME)
            closed = admin.is_closed(self._endpoint, root)
            if self._stays_open:
                if closed:
                    admin.open_again(self._endpoint, root)
            elif not closed:
                admin.close(self._endpoint, PREFIX, root, self._password(NAME))
                self._log.info("etcd.closed", why="only elasticd's logins are served from now on")
        except EtcdUnavailable:
            return 0.03  # it has just been started
        except EtcdDenied as error:
            fix = "restore STATE_DIR/etcd/root-login, or end etcd and move STATE_DIR/etcd/data away (docs/operating.md)"
            return self._say(AGAIN_S, f"{error}: {fix}")
        except (EtcdError, OSError) as error:
            return self._say(1.0, str(error))
        return None

    def _say(self, again_s: float, why: str) -> float:
        if why != self._said:
            self._log.warning("etcd.not_closed", why=why)
            self._said = why
        return again_s

    def _password(self, name: str) -> str:
        return read_file(self._state_dir / "etcd" / name).decode().strip().partition(":")[2]


def _sync(path: Path) -> None:
    with closed_after(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)
