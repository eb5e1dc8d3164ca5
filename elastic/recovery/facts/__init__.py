"""What is known of a job, as pure functions: view, members and leader, evidence, restart budget, incident, stages."""
