"""Process groups: forming, aborting, DDP."""
