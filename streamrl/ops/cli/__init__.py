"""The command line: commands are imported when they are called (`commands`)."""
