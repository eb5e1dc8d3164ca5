"""The job's state: its parts, commits, the choice of a source, broadcast, restore."""
