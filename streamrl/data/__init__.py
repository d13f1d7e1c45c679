"""Datasets: reads and validates them, without a tokenizer and without torch."""
