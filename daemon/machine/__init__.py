"""This machine: name, addresses, GPUs, health, processes, what `elasticctl doctor` finds, notices that it goes away."""
