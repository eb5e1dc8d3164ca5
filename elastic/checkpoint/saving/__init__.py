"""From memory to a checkpoint on disk: the writer process, and how it commits."""
