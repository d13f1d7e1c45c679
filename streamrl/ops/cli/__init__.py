"""The command line: one module a command, none imported before it is called (`commands`)."""
