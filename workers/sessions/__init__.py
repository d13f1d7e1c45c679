"""Sessions: the API an agent uses to query the model, and the token-exact trace of its rollout."""
