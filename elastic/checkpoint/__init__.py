"""Snapshots in shared memory and checkpoints on disk; when the next one is due."""
