"""Commands about jobs: run, stop, logs, events, top, checkpoints."""
