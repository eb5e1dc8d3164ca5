"""The `Job` that a script is given."""
