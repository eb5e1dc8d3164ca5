"""Snapshot of the daemon as JSON: nodes, jobs, ranks, problems; for the API, the page and notifications. Pure."""
