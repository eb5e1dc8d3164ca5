"""The connection to the agent, and misuse that is reported through it."""
