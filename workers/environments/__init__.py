"""Environments: what a model plays against in rollouts of several turns, and how such a rollout keeps its tokens."""
