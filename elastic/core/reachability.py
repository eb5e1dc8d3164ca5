"""Nodes that reach etcd and not each other: whom to leave out, and who is to look at whom. Pure.

Every agent says in its record whom it cannot reach. A dispute is a pair of which one complains of the other: a cut in
one direction is enough, since no connection survives it. From the same complaints everybody draws the same conclusion,
so those who are left out know it as soon as the others do.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

MESH = 16
"""Up to this many members, every agent keeps a line to every other."""

Dispute = tuple[str, str]
"""Two nodes, sorted."""


def disputes(complaints: Mapping[str, Iterable[str]]) -> frozenset[Dispute]:
    """From {who complains: of whom}. Complaints of nodes that do not stand there themselves are void."""
    return frozenset(
        (min(node, other), max(node, other))
        for node, others in complaints.items()
        for other in others
        if other in complaints and other != node
    )


@functools.lru_cache(maxsize=64)
def left_out(open_disputes: frozenset[Dispute], order: tuple[str, ...], seated: frozenset[str]) -> frozenset[str]:
    """The nodes to go on without, so that no dispute is left among the others.

    order: all nodes in dispute; of two with equally many disputes the later one goes.
    seated: those of the present generation. They hold the job's state, so disputes among them are settled first, and
    in one between them and an outsider the outsider goes. At least one of them stays; with none, at least one node.

    Who has most disputes goes first: a node that is cut off has one with everybody who looks at it.
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
    """Drop until no two of `among` are in dispute."""
    place = {node: i for i, node in enumerate(order)}
    inner = {node: {o for o in others if o in among} for node, others in graph.items() if node in among}
    heap = [(-len(graph[node]), -place[node], node) for node, others in inner.items() if others]
    heapq.heapify(heap)
    while heap:
        disputes_then, _, node = heapq.heappop(heap)
        if not inner[node]:
            continue
        if -disputes_then != len(graph[node]):  # fewer since
            heapq.heappush(heap, (-len(graph[node]), -place[node], node))
            continue
        for other in inner[node]:
            inner[other].discard(node)
        inner[node] = set()
        drop(node)


def neighbours(at: int, count: int) -> set[int]:
    """Of `count` places in a ring, those 1, 4, 16, … away from place `at`, on either side: about log2 `count`. Each of
    them has `at` among its own."""
    return {(at + way * 4**k) % count for k in range(1 + count.bit_length() // 2) for way in (1, -1)} - {at}
