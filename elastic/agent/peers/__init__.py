"""Connections to the other agents, and the store of a generation."""
