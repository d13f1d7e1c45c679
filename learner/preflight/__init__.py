"""What is checked before a run, so that a mistake is found minutes earlier: the learner's inputs, and GPU memory."""
