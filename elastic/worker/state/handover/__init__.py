"""How the state gets from ranks, snapshots or checkpoints to the ranks that lack it."""
