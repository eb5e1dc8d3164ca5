"""This machine: name, addresses, GPUs, health, what `elasticctl doctor` finds, notices that it will go away."""
