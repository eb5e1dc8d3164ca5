"""This node's control loop: its events, its writes to etcd, its chores and questions."""
