"""What an agent reads from etcd and writes to it."""
