"""The exit codes of elasticctl, as docs/api.md lists them."""

OK, ERROR, USAGE, DEGRADED, FAILED, NO_DAEMON, NO_ETCD, DENIED = range(8)
INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal, as a shell has it
OF_PHASE = {"succeeded": OK, "failed": FAILED, "stopped": ERROR}
"""How a job has ended."""
