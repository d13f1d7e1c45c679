"""Estimates a rank's GPU memory before any weights are loaded, and which layout fits."""
