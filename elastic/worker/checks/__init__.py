"""Checks of the numbers: gradients, losses that are not finite, replicas that differ."""
