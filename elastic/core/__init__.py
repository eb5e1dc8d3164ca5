"""Pure decision logic: no I/O, no clock, no randomness, no torch, no import of other parts of this project."""
