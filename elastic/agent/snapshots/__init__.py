"""Which generations the job has checkpoints of."""
