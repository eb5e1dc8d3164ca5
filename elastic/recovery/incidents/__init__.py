"""What is recorded of an incident."""
