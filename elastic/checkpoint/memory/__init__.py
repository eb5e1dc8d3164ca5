"""Snapshots in shared memory: arenas, and the copies that fill them."""
