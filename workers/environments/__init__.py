"""Environments: what a model interacts with in multi-turn rollouts."""
