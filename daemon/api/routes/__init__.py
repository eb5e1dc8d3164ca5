"""The answers of the API: one function per path."""
