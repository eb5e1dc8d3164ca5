"""Which samples a rank takes: batches and streams."""
