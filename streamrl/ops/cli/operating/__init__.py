"""Operators' commands: control a run, its dead tickets, the runs in a Redis and its users."""
