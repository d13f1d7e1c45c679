"""Sharing: a host fetches each weight blob once for all its workers, and passes it on to other hosts."""
