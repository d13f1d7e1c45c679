"""What is done to the runs that `tests/faults/judge` looks at: the parts of a run as real processes, and what befalls
them. `make chaos ARGS="judge --minutes 60"` runs it.

    kind ─► its run: server, learner by torchrun, workers ─► volleys of faults ─► drain ─► verdict, audit ─► table
"""
