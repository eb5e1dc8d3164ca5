"""The agent: one job on one node. It owns the job's workers there."""
