"""Connections to the other agents, and the TCPStore at which the ranks of a generation meet."""
