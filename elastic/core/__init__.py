"""Decisions, pure: no I/O, no clock, no randomness, no torch. Imports nothing else of ours."""
