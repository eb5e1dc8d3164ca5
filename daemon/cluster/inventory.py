"""The inventory of the cluster's nodes: what its records should say. Pure.

Each daemon writes the row of its own node when it joins and when its facts change, and once more when it is stopped in
order. The daemon of the oldest node notes since when a node is away. A row stays until its node is back or a user
forgets it; that of a node which left in order goes by itself, so that machines which come and go under ever new names
leave none behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from elastic.contract.records.node_records import KnownNode, NodeRecord

from .cluster import Cluster
from .reconcile import is_oldest

LOST_AFTER_S = 10.0
"""A node whose record is missing for this long is noted: longer than daemons need to register again after an outage of
etcd."""
LEFT_KEPT_S = 7 * 86400.0
"""How long a node that left in order is listed."""


def due(
    cluster: Cluster, me: str, own: NodeRecord | None, missing_s: Callable[[str], float], wall_s: float
) -> Iterator[tuple[str, KnownNode | None]]:
    """(node, its row as it should be; None: none). `own`: the record of this node as it is in etcd, if it is.
    `missing_s`: for how many seconds this daemon has missed the record of a node."""
    if own is not None and cluster.known.get(me) != KnownNode.of(own):
        yield me, KnownNode.of(own)
    if not is_oldest(cluster, me):
        return
    for name, known in cluster.absent.items():
        away_s = missing_s(name)
        if not known.away_wall_s and away_s >= LOST_AFTER_S:
            yield name, msgspec.structs.replace(known, away_wall_s=wall_s - away_s)
        elif known.left and wall_s - known.away_wall_s > LEFT_KEPT_S:
            yield name, None
