"""What is known of a job: its view of etcd, members, evidence, budget, incident, stages. Pure functions."""
