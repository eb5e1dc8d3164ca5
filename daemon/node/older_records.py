"""Records that stand in etcd in place of newer ones: an older one that a client of etcd has written again, or that came
with a backup to which etcd was set back; or anything that is not signed as it should be. The newest genuine record that
a daemon has read counts on, and it writes that over the other.

What was deleted for good (a job that was forgotten, a cordon) is deleted again. A daemon that has started since does
not know the newer record itself, only that there was one: the older one is then shown as refused, unless the daemon of
another node repairs it. An older record of a deletion for good, which has no effect, is then deleted.

The record of a node that is switched off may be put back, too, and kept with a lease: each daemon signs its own anew
every `SIGN_S`, and one that is not signed anew within `UNSIGNED_S` does not count.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import Refusal, View
from elastic.etcd.stamps import Stamps
from elasticd.cluster.cluster import Cluster
from elasticd.cluster.reconcile import Since

from .writer import ClusterWriter

SIGN_S, UNSIGNED_S = 240.0, 600.0
AFTER_S = 2.0
"""A watch may deliver a record after a newer one was read: the newer one follows within this time."""
EACH_S = 0.5
"""The daemon of the oldest node is the first to repair it, each further one this much later."""
KEPT_ENDINGS = 2000
"""Records of deletions for good that stay in etcd, the newest: for daemons that were away meanwhile."""
TRIM_S = 60.0


class OlderRecords:
    def __init__(self, keys: ClusterKeys, stamps: Stamps, node: str, writer: ClusterWriter) -> None:
        self._keys, self._stamps, self._node, self._writer = keys, stamps, node, writer
        self._since = Since()
        self._older: dict[str, tuple[str, Refusal]] = {}
        """Key -> a name of this very record, and the refusal."""
        self._view: View | None = None
        self._signed: dict[str, tuple[int, float]] = {}
        """Key of a node's record -> its stamp, and since when that is known, while etcd can be reached."""
        self._trim_due_s = 0.0

    def look(self, view: View, now_s: float) -> View:
        """A new view as it counts: refused are also the records of nodes that are not signed anew, and not what may
        have arrived late only."""
        if self._view is None and view.connected:
            self._stamps.only({*view.kvs, *view.refused})
        self._view = view if view.connected else self._view
        before = self._older
        self._older = {k: (f"{k} {r.kv.mod_revision}", r) for k, r in view.refused.items() if r.in_place_of_newer}
        for name in {name for name, _ in before.values()} - {name for name, _ in self._older.values()}:
            self._since.lasts_s(name, False, now_s)
        late = {k for k, (name, _) in self._older.items() if self._since.lasts_s(name, True, now_s) < AFTER_S}
        refused = {k: r for k, r in view.refused.items() if k not in late}
        if unsigned := self._unsigned(view, now_s):
            view = replace(view, kvs=MappingProxyType({k: kv for k, kv in view.kvs.items() if k not in unsigned}))
        return replace(view, refused={**refused, **unsigned})

    def _unsigned(self, view: View, now_s: float) -> dict[str, Refusal]:
        nodes = {k: kv for k, kv in view.kvs.items() if k.startswith(self._keys.nodes) and kv.stamp}
        before = self._signed
        self._signed = {
            k: before[k] if k in before and before[k][0] == kv.stamp else (kv.stamp, now_s) for k, kv in nodes.items()
        }
        if not view.connected:
            self._signed = {}  # nothing can be signed meanwhile
        why = f"the node's elasticd has not signed it anew for {UNSIGNED_S / 60:.0f} minutes"
        late = (key for key, (_, since_s) in self._signed.items() if now_s >= since_s + UNSIGNED_S)
        return {key: Refusal(nodes[key], why) for key in late}

    def repair(self, cluster: Cluster, now_s: float) -> None:
        """Called in each turn in which etcd can be reached."""
        if self._view is None:
            return
        by_age = cluster.oldest_first
        place = by_age.index(self._node) if self._node in by_age else len(by_age)
        for key, (name, refusal) in self._older.items():
            newest = self._view.kvs.get(key)
            ending = newest is None and key.startswith(self._keys.endings)  # no effect: another daemon may know more
            is_known = newest is not None or ending or self._stamps.ended(key)
            turn = place + ending * len(by_age)
            if is_known and self._since.lasts_s(name, True, now_s) >= AFTER_S + EACH_S * turn:
                self._writer.put_right(key, refusal.kv, newest)
        if place == 0 and now_s >= self._trim_due_s:
            self._trim_due_s = now_s + TRIM_S
            marks = sorted((kv.stamp, key) for key, kv in self._view.kvs.items() if key.startswith(self._keys.endings))
            if over := [key for _, key in marks[:-KEPT_ENDINGS]]:
                self._writer.delete("old endings", over[:100])
