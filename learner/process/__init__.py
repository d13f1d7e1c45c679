"""The learner's processes and threads: agent, fork server, watchdog, lease, ranks, background jobs."""
