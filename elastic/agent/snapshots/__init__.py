"""Snapshots in this node's memory, and checkpoints from them."""
