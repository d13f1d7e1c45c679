"""Redis: every key, every script, and the stream's two halves, the learner's and the worker's."""
