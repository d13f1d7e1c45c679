"""Mixtures of experts: what their routers say, and are told."""
