"""From memory to a checkpoint on disk: the saver, its writer process, and how it commits."""
