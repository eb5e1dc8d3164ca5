"""The embedded etcd, and what the daemon requires of any."""
