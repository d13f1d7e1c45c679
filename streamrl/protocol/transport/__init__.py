"""Redis: all keys, all scripts, and the two halves of the stream, the learner's and the worker's."""
