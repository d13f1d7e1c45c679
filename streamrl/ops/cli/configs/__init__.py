"""Commands before a run: write a configuration, show it, check it and this machine."""
