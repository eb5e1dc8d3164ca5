"""The audit trail: each change that a user asked for, one line in the log and one event in etcd."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import encode
from elastic.contract.records.node_records import EventRecord
from elastic.etcd.client import Etcd, EtcdError
from elasticd.base.log import Log

from .authority import Peer

HOUR_S = 3600.0
MOST_REFUSED = 10
"""Refused requests of a user that are events of their own, in an hour; those beyond it are one event with their number:
they must not push out other events."""
COUNTED_S = 10.0
"""Least time between two writes of that number."""
MAX_USERS = 1_000
MAX_TEXT_CHARS = 1_000


@dataclass(slots=True)
class _Refused:
    """What one user was refused since `since_s`."""

    since_s: float
    targets: set[tuple[str, str]] = field(default_factory=set)
    more: int = 0
    key: str = ""
    """Of the event with their number."""
    written_s: float = float("-inf")


class Audit:
    def __init__(self, etcd: Etcd, keys: ClusterKeys, node: str, log: Log) -> None:
        """`node`: this daemon's own, which the request was made to."""
        self._etcd = etcd
        self._keys = keys
        self._node = node
        self._log = log
        self._lock = threading.Lock()
        self._refused: dict[int, _Refused] = {}
        """By user id."""

    def done(self, peer: Peer, kind: str, *, job: str = "", node: str = "", text: str = "") -> None:
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
        if status == 403:
            self._refuse(peer, kind, job, node, why)

    def _refuse(self, peer: Peer, kind: str, job: str, node: str, why: str) -> None:
        now_s = time.monotonic()
        with self._lock:
            refused = self._refused.get(peer.uid)
            if refused is None or now_s - refused.since_s >= HOUR_S:
                if len(self._refused) >= MAX_USERS:
                    self._refused.clear()
                refused = self._refused[peer.uid] = _Refused(now_s)
            if len(refused.targets) < MOST_REFUSED and (kind, job or node) not in refused.targets:
                refused.targets.add((kind, job or node))
                key = ""
            else:
                refused.more += 1
                if now_s - refused.written_s < COUNTED_S:
                    return
                refused.written_s, key = now_s, refused.key or self._key()
                refused.key = key
                why = f"and {refused.more} more in this hour, the last: {why}"
        self._write(peer, kind, job, node, f"refused: {why}", key)

    def _key(self) -> str:
        return self._keys.event(time.time(), self._node, uuid.uuid4().hex[:8])

    def _write(self, peer: Peer, kind: str, job: str, node: str, text: str, key: str = "") -> None:
        event = EventRecord(
            when_wall_s=time.time(), kind=kind, job=job, node=node, user=peer.user, uid=peer.uid, pid=peer.pid,
            text=f"{text[:MAX_TEXT_CHARS]} (on {self._node})".lstrip(),
        )  # fmt: skip
        try:
            self._etcd.put(key or self._key(), encode(event))
        except EtcdError as error:
            self._log.warning("audit.not_in_etcd", why=str(error), kind=kind)
