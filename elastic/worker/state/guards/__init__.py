"""Checks that the state holds all that the loop changes."""
