"""Rewards: the sources that give numbers to samples (functions, reward servers), and the server itself."""
