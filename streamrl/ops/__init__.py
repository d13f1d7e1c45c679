"""What an operator runs and sees: commands, launching, monitoring, auditing, recording. Imports neither learner nor
workers, but for the commands that start them.
"""
