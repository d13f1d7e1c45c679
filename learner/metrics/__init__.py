"""What steps add up to, and where it is written down."""
