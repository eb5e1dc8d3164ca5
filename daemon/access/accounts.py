"""Users of this machine, from its user database (files, LDAP, …), which may answer slowly."""

from __future__ import annotations

import grp
import os
import pwd
import queue
import time
from dataclasses import dataclass

from .authority import Account

FRESH_S = 60.0
"""Age from which an answer is asked for again."""


def named(user: str) -> Account | None:
    try:
        return _account(pwd.getpwnam(user))
    except (KeyError, ValueError, OSError):  # ValueError: a NUL in it; OSError: the user database cannot be reached
        return None


def account(uid: int) -> Account:
    """The user of this id; one without a name, as there is in containers, has no groups."""
    try:
        return _account(pwd.getpwuid(uid))
    except (KeyError, OSError):
        return Account(uid, -1, str(uid))


def _account(entry: pwd.struct_passwd) -> Account:
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name, frozenset(groups))


def group_id(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class Looked:
    found: Account | None
    groups: dict[str, int | None]
    """The groups asked about."""
    at_s: float


class Accounts:
    """Answers of the user database, asked for in a thread of its own: the daemon's loop must not wait for LDAP."""

    def __init__(self, groups: tuple[str, ...] = ()) -> None:
        """`groups`: names of groups to look up with each user."""
        self._groups = groups
        self._known: dict[str, Looked] = {}
        self._asked: set[str] = set()
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()

    def look(self, user: str) -> Looked | None:
        """What is known of a user; None: nothing yet."""
        looked = self._known.get(user)
        if user not in self._asked and (looked is None or time.monotonic() - looked.at_s > FRESH_S):
            self._asked.add(user)
            self._queue.put(user)
        return looked

    def run_one(self) -> None:
        """Wait for one question, and answer it: repeated by a thread."""
        user = self._queue.get()
        self._known[user] = look_up(user, self._groups)
        self._asked.discard(user)


def look_up(user: str, groups: tuple[str, ...]) -> Looked:
    return Looked(named(user), {name: group_id(name) for name in groups}, time.monotonic())
