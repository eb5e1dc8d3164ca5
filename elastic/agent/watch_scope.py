"""What this agent watches in etcd: its whole job but for the accounts of ranks, which only daemons read, or in a large
job only the head (see `recovery.watch_scope`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from ..contract.keys import JobKeys
from ..etcd.client import Etcd, EtcdError, View, Watch

WHOLE_S, HEAD_S = 5.0, 15.0
"""How often a watch confirms that etcd answers and is the same as before. Less often for the head: in a large job a
thousand agents ask, and a lease that cannot be renewed reveals an outage sooner."""

log = structlog.get_logger()


class WatchScope:
    """One watch at a time; it passes its views to `post`, in its own thread. Used by the agent's loop only."""

    def __init__(self, etcd: Etcd, keys: JobKeys, crowd: int) -> None:
        """crowd: if the job already has more members than this, start with the head."""
        self._etcd = etcd
        self._keys = keys
        self._crowd = crowd
        self._watch: Watch | None = None
        self._post: Callable[[View], None] = lambda view: None
        self._narrow_since_s: float | None = None
        self.prefix = ""
        """The watched prefix. A view of any other prefix is outdated."""

    def start(self, post: Callable[[View], None], now_s: float) -> None:
        self._post = post
        try:
            many = self._etcd.newest(self._keys.members).count > self._crowd
        except EtcdError:
            many = False  # `choose` narrows the scope when etcd is back
        self._open(not many, now_s)

    @property
    def whole(self) -> bool:
        return self._narrow_since_s is None

    def narrow_for_s(self, now_s: float) -> float | None:
        return None if self._narrow_since_s is None else now_s - self._narrow_since_s

    def choose(self, whole: bool, now_s: float) -> None:
        if whole == self.whole:
            return
        log.info("watch.scope", whole=whole)
        if self._watch is not None:  # close may wait for an answer: not in this thread
            threading.Thread(target=self._watch.close, name="watch-close", daemon=True).start()
        self._open(whole, now_s)

    def _open(self, whole: bool, now_s: float) -> None:
        self._narrow_since_s = None if whole else now_s
        self.prefix = self._keys.root if whole else self._keys.head
        refresh_s = WHOLE_S if whole else HEAD_S
        self._watch = self._etcd.watch(
            self.prefix, self._post, refresh_s=refresh_s, before=self._keys.ranks if whole else ""
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
