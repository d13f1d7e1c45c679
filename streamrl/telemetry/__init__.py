"""What every part says of itself: progress and waits, metrics, logs. The launcher and the monitor only read it."""
