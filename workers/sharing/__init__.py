"""Sharing: a host fetches a blob of weights once, for all its workers, and hands it on to other hosts."""
