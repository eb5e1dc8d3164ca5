"""Notifications: of which events, with what text, to a webhook or a command."""
