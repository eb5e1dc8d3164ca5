"""Agreements between processes: records in etcd, messages, files, the job's spec. No behaviour."""
