"""Chores for the whole cluster: checks and compacts etcd, remembers its nodes (see `reconcile.inventory`).

Called by the loop in each turn in which etcd can be reached.
"""

from __future__ import annotations

from elastic.contract.records.node_records import NodeRecord
from elasticd.base.answers import Certificate
from elasticd.base.settings import Settings
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Cluster
from elasticd.machine import expiring

from .writer import ClusterWriter

ALARMS_S = 5.0
"""Interval between checks for etcd's alarms, and for its version while that is unknown."""

CERTIFICATES_S = 60.0
"""Interval between looks at the files of certificates."""


class Chores:
    def __init__(self, settings: Settings, writer: ClusterWriter) -> None:
        self._settings, self._writer = settings, writer
        self._version_due_s = 0.0
        self._alarms_due_s = 0.0
        self._compact_mark: tuple[float, int] | None = None
        """(monotonic time, revision of etcd at that time) from which on its history is kept."""
        self._missing = reconcile.Since()
        self.certificates: tuple[Certificate, ...] = ()
        self._certificates_due_s = 0.0

    def look_at_certificates(self, now_s: float) -> None:
        """Also while etcd cannot be reached: this may be why."""
        if now_s >= self._certificates_due_s:
            self._certificates_due_s = now_s + CERTIFICATES_S
            self.certificates = expiring.look(self._settings)

    def do(self, cluster: Cluster, registered: NodeRecord | None, now_s: float, wall_s: float) -> None:
        """`registered`: this node's record as it is in etcd."""
        if not self._writer.version and now_s >= self._version_due_s:  # again, while no member has answered
            self._version_due_s = now_s + ALARMS_S
            self._writer.check_version(refuse=reconcile.refuses_unsound(self._settings))
        if now_s >= self._alarms_due_s:
            self._alarms_due_s = now_s + ALARMS_S
            self._writer.check_alarms()
        self._compact(cluster, now_s)
        missing = {
            name: self._missing.lasts_s(name, name not in cluster.nodes, now_s)
            for name in {*cluster.known, *cluster.nodes}
        }
        for name, row in reconcile.inventory(cluster, self._settings.node, registered, missing.__getitem__, wall_s):
            self._writer.put_known(name, row, own=name == self._settings.node)

    def _compact(self, cluster: Cluster, now_s: float) -> None:
        """The oldest node's daemon compacts an external etcd up to `compact_every_s` ago: each revision of a progress
        record takes space, which would be used up within days."""
        every_s = self._settings.etcd.compact_every_s
        here = every_s and self._settings.etcd.endpoints and reconcile.is_oldest(cluster, self._settings.node)
        if not here:
            self._compact_mark = None
        elif self._compact_mark is None:
            self._compact_mark = now_s, cluster.revision
        elif now_s >= self._compact_mark[0] + every_s:
            self._writer.compact(self._compact_mark[1])
            self._compact_mark = now_s, cluster.revision
