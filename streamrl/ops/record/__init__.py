"""Recordings: the groups of a run, saved as they pass, to be read, exported and replayed without Redis.

Redis ──► tap ──► write ──► DIR/00000001.groups, ... ──► read ──► export (JSON Lines, Parquet)
         (reads only)      (frames, see `frames`)            ├──► `streamrl groups`
                                                             └──► a learner: learner.replay
"""
