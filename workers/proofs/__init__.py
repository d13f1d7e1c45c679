"""Does an engine serve what it was told to load? Read-back, and a canary against a plain reference."""
