"""The learner's life as a process: its agent and fork server, watchdog, lease, ranks, and threads beside the loop."""
