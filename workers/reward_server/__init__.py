"""The reward server: serves a reward model over HTTP, and trains one."""
