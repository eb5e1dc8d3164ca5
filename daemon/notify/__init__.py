"""Notifications to a webhook or a command."""
