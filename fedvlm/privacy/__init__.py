"""Differential privacy of a run, and secure aggregation of what clients send."""
