"""When a rank takes a snapshot, and how the agent gets it."""
