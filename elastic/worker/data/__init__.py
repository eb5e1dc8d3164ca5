"""Which samples a rank takes in a step: batches and streams."""
