"""Publishing: when weights are published, how they are encoded beside the loop, and what may be deleted."""
