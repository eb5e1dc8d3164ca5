"""Detection of workers that make no progress."""
