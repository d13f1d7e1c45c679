"""Weights: following the versions that the learner announces, and keeping an engine and its mirror at the newest."""
