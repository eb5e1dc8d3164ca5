"""The description of a job."""
