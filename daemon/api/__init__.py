"""The API on the daemon's socket, and the metrics."""
