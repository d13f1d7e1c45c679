"""Demonstrations, `streamrl quickstart` and `streamrl demo`: a run on this machine, and a report of what it learned."""
