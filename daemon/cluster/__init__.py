"""What is known of all nodes and jobs, and what follows from it: assignment, reconciliation. Pure."""
