"""Supervised training on prompts with their answers: what comes before a run."""
