"""The description of a job (job.toml), and its values."""
