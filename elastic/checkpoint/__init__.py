"""State at rest: snapshots in shared memory, checkpoints on disk."""
