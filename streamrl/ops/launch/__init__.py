"""A whole run on one machine: its parts, started, watched and ended together, and their display."""
