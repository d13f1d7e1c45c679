"""The runs that `tests/faults/judge` judges: a run's parts as real processes, and the faults that hit them. Started by
`make chaos ARGS="judge --minutes 60"`.

    kind ─► its run: server, learner by torchrun, workers ─► volleys of faults ─► drain ─► verdict, audit ─► table
"""
