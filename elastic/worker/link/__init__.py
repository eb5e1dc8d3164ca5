"""The connection to the agent: messages, heartbeats, aborts; and misuse that is reported through it."""
