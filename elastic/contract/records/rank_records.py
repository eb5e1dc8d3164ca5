"""What each agent publishes of its own ranks: where their time went, how long their steps take, what was found."""

from __future__ import annotations

import msgspec

from elastic.contract.numbers import Int, Real, WallS

from .job_records import RankRow, Record, prepare

WRITE_S = 10.0
WATCHERS_PER_S = 1000.0
"""Every daemon watches all of these records: so many deliveries a second are made in a cluster, at most."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's gradients and weights were in one step, in short; all of it is in a file of its node."""

    step: Int
    gradients: str
    """Digest of the gradients of this rank's own samples."""
    weights: str
    """Digest of the weights after the step."""
    without: tuple[str, ...] = ()
    """Parameters that got no gradient; the first few."""
    bad: str = ""
    """The first parameter whose gradient is not finite."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a node. Times are whole milliseconds; the sum over the buckets and `open_ms` is exactly the time
    from `since_ms` to `until_ms`."""

    slot: Int
    rank: Int
    """In the present generation; -1: none."""
    since_ms: Int
    """Time of day at which the first agent of this node began."""
    until_ms: Int
    ranks_ms: dict[str, Int] = {}
    """Bucket of `ledger.Bucket` -> milliseconds. None decreases, but for `stepping` once (`Ledger.plain_ms`)."""
    open_ms: Int = 0
    """Since the newest commit: not in a bucket yet."""
    own_s: tuple[Real, ...] = ()
    """Its own time of a step in its newest windows, the newest last: what other ranks wait for."""
    sample: Sample | None = None
    """The newest sample of its gradients."""
    row: RankRow | None = None
    """What it does: for screens of other nodes, as old as the record."""


class RanksRecord(Record, frozen=True, kw_only=True):
    node: str
    generation: Int
    wall_s: WallS
    ranks: tuple[RankTimes, ...] = ()


def every_s(nodes: int) -> float:
    """Seconds between two writes of one agent, in a job of so many nodes."""
    return max(WRITE_S, nodes * nodes / WATCHERS_PER_S)


prepare(RanksRecord)
