"""Validation beside training: when it runs, and the metrics of its answers."""
