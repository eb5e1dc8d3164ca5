"""The recovery machine, private to the agent: events in, effects out. Pure; see README.md beside this file."""
