"""Environments: what a model plays against in rollouts of several turns."""
