"""This machine: its name, addresses, GPUs, certificates, health, and notices that it will go away."""
