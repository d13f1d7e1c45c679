"""One engine over several hosts: what the worker of the first host and those of the further ones say to each other."""
