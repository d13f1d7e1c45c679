"""Datasets as files: reading and checking them, without a tokenizer and without torch."""
