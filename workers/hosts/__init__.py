"""One engine over several hosts: the protocol between the first host's worker and those of the further hosts."""
