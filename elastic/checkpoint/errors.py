"""What goes wrong with state at rest, and whose fault it is.

CheckpointError
├── ArenaError          the shared memory is too small, gone, or not an arena
│   └── IncompleteSnapshot        it holds no complete snapshot (its writer died, or is at it)
├── SaveFailed          this checkpoint did not become durable; training goes on
│   └── SharesMissing   some share was never written
├── Damaged             a checkpoint is not what its manifest says: set it aside, take the one before
└── NoGoodCheckpoint    there are checkpoints and none can be used: a person must decide
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


class SharesMissing(SaveFailed):
    def __init__(self, step: int, missing: tuple[int, ...], shares: int) -> None:
        listed = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        super().__init__(f"step {step}: {len(missing)} of {shares} shares were not written: {listed}")
        self.missing = missing


class Damaged(CheckpointError):
    """`reason` is one of a few short names, fit for a folder's name; `detail` says what was found and expected."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class NoGoodCheckpoint(CheckpointError):
    pass
