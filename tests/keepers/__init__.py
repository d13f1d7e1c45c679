"""Keepers of sandboxes that are not as a worker's are: another user's, one on a machine that is busy for ever."""
