"""Sessions: the model as an agent of a rollout sees it, and the trace of what it read and said, token for token."""
