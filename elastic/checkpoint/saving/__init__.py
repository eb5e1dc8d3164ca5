"""From memory to a checkpoint on disk."""
