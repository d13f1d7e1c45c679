"""Commands about rewards and environments: try one, serve one, train a reward model."""
