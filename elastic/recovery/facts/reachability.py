"""Nodes that reach etcd but not each other: which to leave out, and which agents probe each other. Pure.

Every agent lists in its member record the nodes that it cannot reach. A dispute is a pair of nodes of which one reports
the other as unreachable: one direction is enough, since no connection survives that. All agents draw the same
conclusion from the same reports, so an agent that is left out finds this out as soon as the others do.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

MESH = 16
"""Up to this many members, every agent keeps a connection to every other."""

Dispute = tuple[str, str]
"""Two nodes, sorted."""


def disputes(complaints: Mapping[str, Iterable[str]]) -> frozenset[Dispute]:
    """From {node: the nodes that it cannot reach}. Reports about nodes that are not keys of it are ignored."""
    return frozenset(
        (min(node, other), max(node, other))
        for node, others in complaints.items()
        for other in others
        if other in complaints and other != node
    )


@functools.lru_cache(maxsize=64)
def left_out(open_disputes: frozenset[Dispute], order: tuple[str, ...], seated: frozenset[str]) -> frozenset[str]:
    """The nodes to leave out, so that no dispute remains among the others.

    order: all nodes in a dispute; of two with equally many disputes the later one is left out.
    seated: those with a place in the current generation. They hold the job's state, so disputes among them are settled
    first, and in a dispute with an outsider the outsider is left out. At least one of them stays; if there is none, at
    least one node.

    The node with most disputes is left out first: a partitioned node has one with each node that probes it.
    """
    graph: dict[str, set[str]] = {node: set() for node in order}
    for a, b in open_disputes:
        graph[a].add(b)
        graph[b].add(a)
    out: set[str] = set()

    def drop(node: str) -> None:
        out.add(node)
        for other in graph.pop(node):
            graph[other].discard(node)

    _settle(graph, order, seated, drop)
    for node in order:
        if node in graph and node not in seated and graph[node] & seated:
            drop(node)
    _settle(graph, order, frozenset(order), drop)
    return frozenset(out)


def _settle(
    graph: Mapping[str, set[str]], order: Sequence[str], among: Collection[str], drop: Callable[[str], None]
) -> None:
    """Drop nodes until no two of `among` are in dispute."""
    place = {node: i for i, node in enumerate(order)}
    inner = {node: {o for o in others if o in among} for node, others in graph.items() if node in among}
    heap = [(-len(graph[node]), -place[node], node) for node, others in inner.items() if others]
    heapq.heapify(heap)
    while heap:
        disputes_then, _, node = heapq.heappop(heap)
        if not inner[node]:
            continue
        if -disputes_then != len(graph[node]):  # it has fewer by now
            heapq.heappush(heap, (-len(graph[node]), -place[node], node))
            continue
        for other in inner[node]:
            inner[other].discard(node)
        inner[node] = set()
        drop(node)


def neighbours(at: int, count: int) -> set[int]:
    """Of `count` places in a ring, those 1, 4, 16, … away from place `at`, on either side: about log2 `count`. The
    relation is symmetric."""
    return {(at + way * 4**k) % count for k in range(1 + count.bit_length() // 2) for way in (1, -1)} - {at}
