"""Mixture-of-experts models: observing routers and replaying their choices."""
