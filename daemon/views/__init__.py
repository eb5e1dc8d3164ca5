"""The daemon's snapshot as JSON, for the API, the page and notifications. Pure."""
