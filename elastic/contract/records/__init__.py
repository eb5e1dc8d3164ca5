"""Records in etcd: jobs, generations, members, incidents, nodes, ledgers."""
