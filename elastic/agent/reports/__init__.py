"""What an agent tells of its job: status, ledgers, history, metrics, incidents, logs."""
