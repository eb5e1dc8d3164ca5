"""What of its job this agent watches in etcd: all of it, or in a large one the head (see `core.watch_scope`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from ..core.keys import JobKeys
from ..etcd import Etcd, EtcdError, View, Watch

WHOLE_S, HEAD_S = 5.0, 15.0
"""How often etcd is asked whether it is there and the same as before. In a large job that is a thousand who ask; and
a lease that cannot be renewed tells them sooner that etcd is away."""

log = structlog.get_logger()


class WatchScope:
    """One watch at a time; its pictures go to `post`, in a thread of their own. Used by the agent's loop alone."""

    def __init__(self, etcd: Etcd, keys: JobKeys, crowd: int) -> None:
        """crowd: with more members than this already there, begin with the head."""
        self._etcd = etcd
        self._keys = keys
        self._crowd = crowd
        self._watch: Watch | None = None
        self._post: Callable[[View], None] = lambda view: None
        self._narrow_since_s: float | None = None
        self.prefix = ""
        """What is watched. A picture of anything else is from before."""

    def start(self, post: Callable[[View], None], now_s: float) -> None:
        self._post = post
        try:
            many = self._etcd.newest(self._keys.members).count > self._crowd
        except EtcdError:
            many = False  # it will be seen when etcd is back
        self._open(not many, now_s)

    @property
    def whole(self) -> bool:
        return self._narrow_since_s is None

    def narrow_for_s(self, now_s: float) -> float | None:
        return None if self._narrow_since_s is None else now_s - self._narrow_since_s

    def choose(self, whole: bool, now_s: float) -> None:
        if whole == self.whole:
            return
        log.info("sight", whole=whole)
        if self._watch is not None:  # it may wait for an answer: not here
            threading.Thread(target=self._watch.close, name="sight-close", daemon=True).start()
        self._open(whole, now_s)

    def _open(self, whole: bool, now_s: float) -> None:
        self._narrow_since_s = None if whole else now_s
        self.prefix = self._keys.root if whole else self._keys.head
        self._watch = self._etcd.watch(self.prefix, self._post, refresh_s=WHOLE_S if whole else HEAD_S)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
