"""Metrics for Prometheus."""
