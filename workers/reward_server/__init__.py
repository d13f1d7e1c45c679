"""The reward server: a reward model that is served over HTTP, and one that is trained."""
