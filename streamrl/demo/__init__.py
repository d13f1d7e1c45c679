"""The demo: a pretrained instruction model learns sums, with its own tokenizer and chat template."""
