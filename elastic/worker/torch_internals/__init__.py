"""Everything that relies on torch's private API or on the interpreter's memory."""
