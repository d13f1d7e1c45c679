"""Commands that train: whole runs on this machine, the learner alone, supervised training."""
