"""Errors of snapshots and checkpoints.

CheckpointError
├── ArenaError          the shared memory is too small, gone, or not an arena
│   └── IncompleteSnapshot        it holds no complete snapshot (its writer died, or is filling it)
├── SaveFailed          this checkpoint did not become durable; training continues
│   └── ShardsMissing   some shards were never written
├── Damaged             a checkpoint does not match its manifest: quarantine it, use the one before
└── NoGoodCheckpoint    there are checkpoints but none is usable: needs an operator's decision
"""

from __future__ import annotations


class CheckpointError(Exception):
    pass


class ArenaError(CheckpointError):
    pass


class IncompleteSnapshot(ArenaError):
    pass


class SaveFailed(CheckpointError):
    pass


class ShardsMissing(SaveFailed):
    def __init__(self, step: int, missing: tuple[int, ...], shards: int) -> None:
        listed = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        super().__init__(f"step {step}: {len(missing)} of {shards} shards were not written: {listed}")
        self.missing = missing


class Damaged(CheckpointError):
    """`reason` is one of a few short names, usable in a directory's name; `detail` states what was found and
    expected."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class NoGoodCheckpoint(CheckpointError):
    pass
