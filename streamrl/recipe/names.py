"""The names of a sample's rewards: a source's own, or `environment.NAME` for one that an agent names as it plays."""

from __future__ import annotations

ENVIRONMENT = "environment"  # the source that an environment, or an agent, is


def source_of(name: str) -> str:
    """Return the source that a reward of this name belongs to."""
    return ENVIRONMENT if name.startswith(f"{ENVIRONMENT}.") else name
