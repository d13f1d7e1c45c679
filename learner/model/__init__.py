"""The policy: a model that is asked for log-probs, the way that is settled at start, its adapters."""
