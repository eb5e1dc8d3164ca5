"""The agents that this daemon starts, adopts and supervises; their jobs' folders, logs and cleanup."""
