"""Which bound ended a finished run, and the setting that gives it more to do: its steps if they reached
training.max_steps, otherwise its passes over the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_STEPS, MAX_EPOCHS = "training.max_steps", "training.max_epochs"


def bound_of(max_steps: int | None, *, step: int) -> str:
    """Return the setting that ends a run at this step; `max_steps` is -1 or None without a bound."""
    return MAX_STEPS if max_steps is not None and 0 <= max_steps <= step else MAX_EPOCHS


def longer(training: Mapping[str, Any], *, step: int) -> str:
    """Return KEY=VALUE for `streamrl up` that doubles the bound; `training` is that section of the finished run."""
    bound = bound_of(training.get("max_steps"), step=step)
    return f"{bound}={2 * (step if bound == MAX_STEPS else int(training.get('max_epochs', 1)))}"
