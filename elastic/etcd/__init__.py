"""The only part that talks to etcd: client, keepers, wire format."""
