"""The parts of a state, and how each is read and loaded."""
