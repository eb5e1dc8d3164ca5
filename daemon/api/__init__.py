"""The API on the daemon's socket, the page, and the metrics."""
