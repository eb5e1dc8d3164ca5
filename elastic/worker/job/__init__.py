"""The `Job` that a script is given: commit, batches, evaluation, logged values."""
