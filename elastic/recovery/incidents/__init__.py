"""When an incident opens and closes, and what its record says."""
