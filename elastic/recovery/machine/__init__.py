"""The state machine's state, events and effects, and one turn of it."""
