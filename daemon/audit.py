"""The audit trail: each change that a user asked for, one line in the log and one event in etcd."""

from __future__ import annotations

import threading
import time
import uuid

from elastic.contract.keys import ClusterKeys
from elastic.contract.node_records import EventRecord
from elastic.contract.records import encode
from elastic.etcd.client import Etcd, EtcdError

from .authority import Peer
from .log import Log

REPEATED_S = 60.0
"""A refused request is written to etcd once in this time per user and target: it must not push out other events."""
MAX_REFUSED = 1_000
"""How many refused requests are remembered for that."""
MAX_TEXT_CHARS = 1_000


class Audit:
    def __init__(self, etcd: Etcd, keys: ClusterKeys, node: str, log: Log) -> None:
        """`node`: this daemon's own, which the request was made to."""
        self._etcd = etcd
        self._keys = keys
        self._node = node
        self._log = log
        self._lock = threading.Lock()
        self._refused: dict[tuple[int, str, str], float] = {}

    def done(self, peer: Peer, kind: str, *, job: str = "", node: str = "", text: str = "") -> None:
        """A change was made."""
        self._log.info(
            "audit", kind=kind, job=job, target_node=node, result="done", text=text, uid=peer.uid, by=peer.user,
            by_pid=peer.pid,
        )  # fmt: skip
        self._write(peer, kind, job, node, text)

    def failed(self, peer: Peer, kind: str, status: int, why: str, *, job: str = "", node: str = "") -> None:
        """A change was refused, with this HTTP status. In etcd only if the user may not make it: other mistakes change
        nothing and endanger nothing."""
        self._log.warning(
            "audit", kind=kind, job=job, target_node=node, result=f"refused: {status}", text=why, uid=peer.uid,
            by=peer.user, by_pid=peer.pid,
        )  # fmt: skip
        if status == 403 and self._is_new((peer.uid, kind, job or node)):
            self._write(peer, kind, job, node, f"refused: {why}")

    def _is_new(self, key: tuple[int, str, str]) -> bool:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._refused.get(key, -REPEATED_S) < REPEATED_S:
                return False
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused[key] = now_s
            return True

    def _write(self, peer: Peer, kind: str, job: str, node: str, text: str) -> None:
        now_s = time.time()
        event = EventRecord(
            when_wall_s=now_s, kind=kind, job=job, node=node, user=peer.user, uid=peer.uid, pid=peer.pid,
            text=f"{text[:MAX_TEXT_CHARS]} (on {self._node})".lstrip(),
        )  # fmt: skip
        try:
            self._etcd.put(self._keys.event(now_s, self._node, uuid.uuid4().hex[:8]), encode(event))
        except EtcdError as error:
            self._log.warning("audit.not_in_etcd", why=str(error), kind=kind)
