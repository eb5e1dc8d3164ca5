"""Checks of the numbers: gradients, losses, replicas."""
