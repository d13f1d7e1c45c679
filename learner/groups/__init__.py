"""Rank 0's half of the stream: which tickets go out, what becomes of each group, and what all ranks train next."""
