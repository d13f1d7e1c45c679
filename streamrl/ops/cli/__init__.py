"""The command line: commands that are imported when they are called (`commands`)."""
