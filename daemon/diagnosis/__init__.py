"""Incidents and goodput, read from the records: verdicts, cures, costs. Pure."""
