"""Incidents and goodput, read from the records: verdicts, fixes, costs. Pure."""
