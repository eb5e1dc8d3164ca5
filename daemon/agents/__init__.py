"""The agents that this daemon starts, as which user, adopts and supervises; their jobs' folders, logs and cleanup."""
