"""The only part that talks to etcd: client, leases, signatures of records, wire format."""
