"""Weights out: what is published when, how it is encoded beside the loop, and what may be deleted."""
