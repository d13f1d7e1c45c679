"""Rank 0's way to becoming the run's learner: lease, term, claim, and the Start that all ranks get."""
