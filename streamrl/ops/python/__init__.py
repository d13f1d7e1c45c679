"""Runs from Python or a notebook: `streamrl.start`, `streamrl.attach`, and the `Run` that they return."""
