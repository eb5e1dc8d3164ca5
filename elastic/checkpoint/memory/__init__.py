"""Snapshots in shared memory."""
