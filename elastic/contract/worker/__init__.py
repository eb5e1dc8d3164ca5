"""Messages and memory shared by a worker and its agent."""
