"""Metrics of each step, and where they are recorded."""
