"""Proofs that an engine serves the weights it was told to load: read-back, and a canary against a plain reference."""
