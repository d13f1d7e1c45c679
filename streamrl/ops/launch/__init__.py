"""A whole run on one machine: the parts, started, watched and ended together, and what can be seen of them."""
