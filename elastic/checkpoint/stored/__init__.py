"""Checkpoints on disk: found, verified, read, exported, copied, removed."""
