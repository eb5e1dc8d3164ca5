"""Processes that outlive the daemon: start, sandbox, guard and end of agents and the embedded etcd."""
