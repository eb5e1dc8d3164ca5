"""Which rank saves which tensors: replicated state is split into one shard per rank, in whole tensors.

Every rank computes the same split from the same table, without communication. Tensors within plain values and objects
are not split: a rank may have others than the rest (`if rank == 0: state.best = …`). They stay together with the JSON
that names them, of one rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable

from elastic.contract.worker.tensor_table import Table

Snapshot = tuple[int, int, int, int]
"""(generation, step, part, parts) of one complete arena."""


def assign_shards(table: Table, count: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `table` per shard, ascending; balanced by bytes, deterministic, possibly empty.

    Largest first, each to the shard that is smallest so far (the lowest number among equals).
    """
    if count < 1:
        raise ValueError(f"count = {count}: state is cut into at least one shard")
    shards: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, shard) for shard in range(count)]
    for index in sorted(range(len(table)), key=lambda i: (-table[i].nbytes, i)):
        load, shard = lightest[0]
        shards[shard].append(index)
        heapq.heapreplace(lightest, (load + table[index].nbytes, shard))
    return tuple(tuple(sorted(shard)) for shard in shards)


def split(table: Table, apart: Collection[str], count: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(`assign_shards` of the others, indices into `table` of the tensors named in `apart`)."""
    together = tuple(index for index, info in enumerate(table) if info.name not in apart)
    cuts = assign_shards(tuple(table[index] for index in together), count)
    return (
        tuple(tuple(together[index] for index in cut) for cut in cuts),
        tuple(index for index, info in enumerate(table) if info.name in apart),
    )


def beside_shards(shard: int, shards: int, part: int, parts: int) -> tuple[int, ...]:
    """Shards of other nodes that the rank which saves shard `shard` of `shards` also keeps in memory.

    It is rank `part` of the `parts` ranks of its node, whose shards are numbered consecutively. Together the ranks of
    a node keep every shard.
    """
    first = shard - part
    others = [k for k in range(shards) if not first <= k < first + parts]
    return tuple(others[part::parts])


def newest_complete(snapshots: Iterable[Snapshot]) -> tuple[int, int, int] | None:
    """(generation, step, parts) of the newest complete snapshot; None if there is none."""
    seen: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
    for generation, step, part, parts in snapshots:
        seen[generation, step, parts].add(part)
    return max((key for key, have in seen.items() if have >= set(range(key[2]))), default=None)
