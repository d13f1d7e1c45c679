"""Recordings: the groups of a run, saved as they pass, to be read, exported and replayed without Redis.

Redis ──► tap ──► write ──► DIR/00000001.groups, ... ──► protocol.recording ──► export (JSON Lines, Parquet)
         (reads only)                                        ├──► `streamrl groups`
                                                             └──► a learner: learner.replay
"""
