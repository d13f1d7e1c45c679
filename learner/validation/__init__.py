"""Validation beside training: when it is asked for, and what its answers add up to."""
