"""Supervised training on prompts with answers, before an RL run."""
