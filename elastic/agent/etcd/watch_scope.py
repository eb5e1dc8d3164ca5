"""What this agent watches in etcd: its whole job but for the accounts of ranks, which only daemons read, or in a large
job only the head (see `recovery.watch_scope`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MappingProxyType

import structlog

from elastic.contract.keys import JobKeys
from elastic.contract.structs import replace
from elastic.etcd.client import KV, Etcd, EtcdError, EtcdUnavailable, View, Watch

COMPLETE_S, HEAD_S = 5.0, 15.0
"""How often a watch confirms that etcd answers and is the same as before. Less often for the head: in a large job a
thousand agents ask, and a lease that cannot be renewed reveals an outage sooner."""
BASE_AGAIN_S = 1.0
"""If the base that was read is not that of the newest generation: until it is read again."""

log = structlog.get_logger()


class WatchScope:
    """One watch at a time; it passes its views to `post`, in its own thread. Used by the agent's loop only."""

    def __init__(self, etcd: Etcd, keys: JobKeys, crowd: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """crowd: if the job already has more members than this, start with the head."""
        self._etcd = etcd
        self._keys = keys
        self._crowd = crowd
        self._clock_s = clock_s
        self._watch: Watch | None = None
        self._post: Callable[[View], None] = lambda view: None
        self._narrow_since_s: float | None = None
        self.prefix = ""
        """The watched prefix. A view of any other prefix is outdated."""
        self._base: KV | None = None
        self._base_wanted, self._base_read_s = False, float("-inf")

    def start(self, post: Callable[[View], None], now_s: float) -> None:
        self._post = post
        try:
            many = self._etcd.newest(self._keys.members).count > self._crowd
        except EtcdError:
            many = False  # `choose` narrows the scope when etcd is back
        self._open(not many, now_s)

    @property
    def complete(self) -> bool:
        return self._narrow_since_s is None

    def narrow_for_s(self, now_s: float) -> float | None:
        return None if self._narrow_since_s is None else now_s - self._narrow_since_s

    def choose(self, complete: bool, now_s: float) -> None:
        if complete == self.complete:
            return
        before = self._watch
        try:
            self._open(complete, now_s)
        except EtcdUnavailable as error:  # no thread can be started: chosen again at the next beat
            log.warning("watch.scope_stays", complete=self.complete, why=str(error))
            return
        log.info("watch.scope", complete=complete)
        if before is not None:
            before.close(wait=False)  # it may wait for an answer

    def _open(self, complete: bool, now_s: float) -> None:
        """Raises EtcdUnavailable; then nothing has changed."""
        prefix, refresh_s = (self._keys.root, COMPLETE_S) if complete else (self._keys.head, HEAD_S)
        self._watch = self._etcd.watch(
            prefix,
            self._post,
            refresh_s=refresh_s,
            before=self._keys.ranks if complete else "",
            completed=None if complete else self._with_base,
        )
        self._narrow_since_s, self.prefix = None if complete else now_s, prefix

    def read_base(self) -> None:
        """The newest generation of a large job tells its changes since nodes that this agent has not seen: see
        `generation_delta`. They are below no head, as most agents do have them. The next view has them."""
        self._base_wanted = True
        if self._watch is not None:
            self._watch.nudge()

    def _with_base(self, view: View) -> View:
        """In the watch's thread. Raises EtcdError."""
        if self._base_wanted and view.connected:
            if (left_s := self._base_read_s + BASE_AGAIN_S - self._clock_s()) > 0:
                raise EtcdUnavailable(f"{self._keys.base} is of another generation: read again in {left_s:.1f} s")
            self._base_read_s = self._clock_s()
            self._base, self._base_wanted = self._etcd.get(self._keys.base), False
        return replace(view, kvs=MappingProxyType({**view.kvs, self._keys.base: self._base})) if self._base else view

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
