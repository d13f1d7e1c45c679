"""What every part reports about itself: progress and waits, metrics, logs. Launcher and monitor only read it."""
