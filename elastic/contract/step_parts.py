"""What a rank's steps consist of, as its agent publishes it."""

from __future__ import annotations

import msgspec


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of a step over a window. None: not measured, as the host does not wait for a GPU's work."""

    step_s: float
    """From commit to commit."""
    data_s: float
    """Until the next batch was there, in `job.batches` and `job.streams`."""
    compute_s: float | None
    """The script's own code: forward, backward and all else, up to the last gradient."""
    collectives_s: float | None
    """From the last own contribution until all others' have arrived: waiting for the slowest rank, and moving bytes."""
    optimizer_s: float | None
    """From the optimizer's step to the commit."""
    snapshot_s: float
    """Standing still for a snapshot; a copy beside the training is not counted."""


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose own work takes longer than that of the other ranks of its node."""

    rank: int
    node: str
    ratio: float
    """Its own time of a step over the median of the others'."""
