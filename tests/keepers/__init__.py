"""Sandbox keepers that differ from a worker's: another user's, one at normal priority, one on an overloaded machine."""
