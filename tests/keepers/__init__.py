"""Keepers of sandboxes that are not as a worker's are: another user's, one that asks for its share of the
processors, one on a machine that is busy for ever."""
