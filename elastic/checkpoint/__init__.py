"""Snapshots in shared memory, checkpoints on disk."""
