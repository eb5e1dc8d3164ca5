"""The state of a job: its parts, commits, and the choice of a source after a failure."""
