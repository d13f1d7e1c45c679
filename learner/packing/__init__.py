"""Packs many sequences into few rows: cells, micro-batches, attention, and the ways a model may be called."""
