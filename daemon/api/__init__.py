"""What the daemon tells: the API on its socket, the page, metrics, notifications."""
