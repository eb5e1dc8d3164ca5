"""Checkpoints on disk: found, verified, read, exported, copied to a remote end, removed (retention)."""
