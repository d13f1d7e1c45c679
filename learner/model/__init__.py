"""The policy: a model that returns log-probs, how it is called (settled at start), and its adapters."""
