"""Rank 0's side of the stream: which tickets are issued, what becomes of each group, what all ranks train next."""
