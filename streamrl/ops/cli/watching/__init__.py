"""Commands that only read a run: its state, pages and plots, rollouts, recordings, and the audit."""
